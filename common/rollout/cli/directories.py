"""Output directories on this machine that a user names: by path, or as a run is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.cli.references import LAST, means
from rollout.client.private import STATE_DIR, private_runs
from rollout.client.recent import recent_runs
from rollout.model.errors import ConfigError
from rollout.model.ids import is_ulid, short
from rollout.workloads.output import RUN_ID

Tell = Callable[[str], None]
_NEAR = (".", "*", "*/*")
"""Patterns of directories to search, beside those whose private cluster is known."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of output directory. `name` and `plural` say what it holds; `is_one` tests a directory."""

    name: str
    plural: str
    is_one: Callable[[Path], bool]


def directory_of(kind: Kind, text: str, tell: Tell) -> Path | None:
    """Return the directory that `text` names, which need not be of `kind`, or None."""
    path = Path(text).expanduser()
    if path.is_dir() and (kind.is_one(path) or _is_path(text)):
        return path
    if (found := _known(kind, text)) is not None:
        tell(f"the {kind.name} is in {found}")
        return found
    return path if _is_path(text) or path.exists() else None


def _is_path(text: str) -> bool:
    return "/" in text or text in (".", "..")


@dataclass(frozen=True, slots=True)
class _Found:
    run_id: str
    name: str
    path: Path
    near: bool
    """Whether it is below the current directory."""


def _known(kind: Kind, text: str) -> Path | None:
    """Return the directory of `text` on this machine, or None.

    Directories below the current one take precedence. Raises ConfigError if several match and none takes precedence.
    """
    first: dict[Path, _Found] = {}
    for one in _found(kind):
        first.setdefault(one.path.resolve(), one)
    near = [one for one in first.values() if one.near]
    return _among(kind, near, text) or _among(kind, [one for one in first.values() if not one.near], text)


def _among(kind: Kind, found: Sequence[_Found], text: str) -> Path | None:
    """Return the directory among `found`, as `_known` does."""
    if text == LAST:
        of_run = {one.run_id: one.path for one in found}
        return next((of_run[run_id] for run_id in recent_runs() if run_id in of_run), None)
    named = [one for one in found if one.name == text]
    if len(named) > 1:
        listed = ", ".join(str(one.path) for one in named)
        raise ConfigError(
            f'{len(named)} {kind.plural} are called "{text}": name the directory of the one that is meant: {listed}'
        )
    if named:
        return named[0].path
    wanted = text.upper()
    by_id = [one for one in found if one.run_id == wanted or (not is_ulid(wanted) and means(one.run_id, text))]
    if len(by_id) > 1:
        listed = ", ".join(f"{short(one.run_id)} ({one.path})" for one in by_id)
        raise ConfigError(f"{text!r} may be any of {len(by_id)} {kind.plural}: {listed}")
    return by_id[0].path if by_id else None


def known_directories(kind: Kind) -> dict[str, Path]:
    """Return, by name, the directories of this machine that a name alone finds; of several, the nearest."""
    found: dict[str, Path] = {}
    for one in _found(kind):
        found.setdefault(one.name, one.path)
    return found


def _found(kind: Kind) -> Iterator[_Found]:
    for pattern in _NEAR:
        with suppress(OSError):
            for path in sorted(Path().glob(f"{pattern}/{RUN_ID}")):
                if not any(part.startswith(".") for part in path.parts[:-1]):
                    yield from _at(kind, path.parent, "", near=True)
    for run in reversed(private_runs()):
        output = run.state.parent if run.state.name == STATE_DIR else run.state
        yield from _at(kind, output, run.name, near=False)


def _at(kind: Kind, path: Path, name: str, *, near: bool) -> Iterator[_Found]:
    with suppress(OSError, ValueError):
        if kind.is_one(path):
            yield _Found((path / RUN_ID).read_text("ascii").strip(), name or path.resolve().name, path, near)
