"""Finds a project and its interpreter."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.model.errors import ConfigError
from rollout.processes.command import run

if TYPE_CHECKING:  # workers, which read no configuration, import this too
    from rollout.workloads.test.config import FrameworkSection

FILE = "offload.toml"
_MARKS = ("pyproject.toml", "pytest.ini", "tox.ini", "setup.cfg", "Cargo.toml", "package.json", "go.mod")
_ENDS = (".git", ".hg")
"""A directory with one of these is the top of a project."""
_CONFIGURATIONS = frozenset({".coveragerc", ".pytest.ini", ".pytest.toml", ".babelrc", ".swcrc"})
_VENVS = (".venv", "venv")
ELSEWHERE = (
    "/bin/sh",
    "-c",
    'for one in .venv/bin/python venv/bin/python; do [ -x "$one" ] && exec "$one" "$@"; done\n'
    'exec "$(command -v python || command -v python3)" "$@"',
    "python",
)
"""Calls the interpreter of a copy of a project whose configuration does not name one."""
_HAS_PYTEST = (
    "import sys; sys.path[:] = [one for one in sys.path if one]; import importlib.util; "
    "sys.exit(importlib.util.find_spec('pytest') is None)"
)
"""Excludes the current directory, whose files may shadow the standard library."""
_LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class Project:
    """A project. `file` is its offload.toml, or None."""

    root: Path
    file: Path | None


def find_project(start: Path, file: Path | None = None) -> Project:
    """Return the project: the nearest directory from `start` upward with an offload.toml, else with a typical project
    file, else `start` itself. If the user named the configuration, `file`, its directory is the project."""
    if file is not None:
        return Project(file.absolute().parent, file)
    above = list(_upward(start.absolute()))
    for directory in above:
        if (directory / FILE).is_file():
            return Project(directory, directory / FILE)
    marked = (directory for directory in above if any((directory / mark).is_file() for mark in _MARKS))
    return Project(next(marked, above[0]), None)


def _upward(start: Path) -> Iterator[Path]:
    for directory in (start, *start.parents):
        yield directory
        if any((directory / end).exists() for end in _ENDS):
            return


def dot_files(root: Path) -> frozenset[str]:
    """Return dot files at the top that belong to the project: those that git tracks, and those that frameworks read."""
    try:
        listing = ["git", "ls-files", "-z", "--", ".*"]
        tracked = run(listing, cwd=root, timeout_s=_LOOK_S, errors="surrogateescape").stdout
    except OSError:  # there is no git
        tracked = ""
    return _CONFIGURATIONS | {name for name in tracked.split("\0") if name and "/" not in name}


def find_python(root: Path, framework: FrameworkSection) -> tuple[str, ...]:
    """Return the words that call the project's interpreter, which has pytest. Raises ConfigError if there is none.

    A path inside the project is relative to `root`, so that it also works in a copy.
    """
    named = _named(framework)
    if named:
        key = "python" if framework.python else "command"
        if shutil.which(root / named[0] if "/" in named[0] else named[0]) is None:
            raise ConfigError(f"framework.{key}: there is no program {named[0]}")
        if not _has_pytest(named, root):
            raise ConfigError(
                f"framework.{key}: {shlex.join(named)} cannot import pytest: "
                "install pytest there, or name another interpreter"
            )
        return named
    tried: list[str] = []
    for candidate in _candidates(root):
        if _has_pytest((candidate,), root):
            return (candidate,)
        tried.append(candidate)
    raise ConfigError(
        f"no interpreter of the project {root} can import pytest (tried {', '.join(tried) or 'none'}): install pytest "
        'there, or say which one it is with [framework] python = "..."'
    )


def passed_over(root: Path, python: Sequence[str]) -> str:
    """Return the interpreter of a virtual environment of the project that was skipped for `python` because it has no
    pytest."""
    venvs = [one for one in _candidates(root) if not Path(one).is_absolute()]
    return venvs[0] if venvs and Path(python[0]).is_absolute() and len(python) == 1 else ""


def _named(framework: FrameworkSection) -> tuple[str, ...]:
    if framework.python:
        return tuple(shlex.split(framework.python))
    words = shlex.split(framework.command or "")
    if words[-2:] == ["-m", "pytest"]:
        return tuple(words[:-2])
    if words and Path(words[-1]).name in ("pytest", "py.test"):
        return (*words[:-1], "python") if len(words) > 1 else _beside(words[0])
    if words and words != ["python"]:
        raise ConfigError(
            f'framework.command: {framework.command!r} does not end in pytest: write it as "python -m pytest" or '
            '"uv run pytest", and arguments as run_args'
        )
    return tuple(words)


def _beside(pytest: str) -> tuple[str, ...]:
    """Return the interpreter next to a program `pytest`."""
    found = shutil.which(pytest)
    python = Path(found).with_name("python") if found else None
    return (str(python),) if python is not None and python.exists() else ("python",)


def _candidates(root: Path) -> Iterator[str]:
    for name in _VENVS:
        if (root / name / "bin" / "python").exists():
            yield f"{name}/bin/python"
    for name in ("python", "python3"):
        if found := shutil.which(name):
            yield found
    yield sys.executable


def _has_pytest(words: Sequence[str], root: Path) -> bool:
    try:
        return run([*words, "-c", _HAS_PYTEST], cwd=root, timeout_s=_LOOK_S).code == 0
    except OSError:
        return False
