"""Finds tests whose result is known, because nothing they depend on has changed since they passed.

With `--cached` a test depends on every file of the project. With `--affected` it depends on the files that its file
imports, directly or not, on all conftest.py above it, and on non-Python files in their directories. Both add lock files
and other files at the top, the configuration of the group, the image, and the versions of installed packages.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from blake3 import blake3

from rollout.processes.command import run
from rollout.workloads.code import read_code
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.test.cases import Case
from rollout.workloads.test.project import dot_files
from rollout.workloads.test.run_config import GroupConfig

Depends = Literal["project", "imports"]
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(:\w+)?", re.ASCII)
_INSTALLED = (
    "import importlib.metadata as m, sys; "
    "print(sys.version, sorted(f'{d.metadata[\"Name\"]}=={d.version}' for d in m.distributions()))"
)
_LOOK_S = 60.0
_PROSE = frozenset({".md", ".rst"})


def keys_of(
    cases: Iterable[Case],
    depends: Depends,
    root: Path,
    leave_out: Sequence[Path],
    groups: Mapping[str, GroupConfig],
    place: JsonObject,
) -> dict[tuple[str, str], bytes]:
    """Return a hash of everything that each test's result depends on, by group and id. `place` is where tests run."""
    files = {file.path: file.object_id for file in read_code(root, list(leave_out), hidden=dot_files(root)).tree.files}
    digests: dict[str, bytes] = {}
    imports = Imports(root, files) if depends == "imports" else None
    of_group = {name: _of_group(group, root, place, depends) for name, group in groups.items()}
    keys: dict[tuple[str, str], bytes] = {}
    for case in cases:
        path = case.file if imports is not None and case.file.endswith(".py") and case.file in files else ""
        if path not in digests:
            names = files if imports is None or not path else imports.behind(path)
            digests[path] = blake3(canonical(sorted([name, files[name].hex()] for name in names))).digest()
        keys[case.group, case.id] = blake3(of_group[case.group] + digests[path] + case.id.encode()).digest()
    return keys


def _of_group(group: GroupConfig, root: Path, place: JsonObject, depends: Depends) -> bytes:
    installed = ""
    if group.python:
        try:
            words = [*group.python, "-c", _INSTALLED]
            installed = run(words, cwd=root, timeout_s=_LOOK_S).stdout
        except OSError:
            installed = ""
    return blake3(canonical([depends, group.model_dump(mode="json"), installed, place])).digest()


class Imports:
    """The files of a project that a file depends on according to its text. When in doubt it includes more: a name
    stands for each file that it could mean, wherever the search path begins outside packages, and so does a string in
    tests that looks like a name."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self._root = root
        self._files = frozenset(files)
        self._named: dict[str, set[str]] = defaultdict(set)
        self._beside: dict[str, set[str]] = defaultdict(set)  # by directory: files that are no Python
        self._direct: dict[str, frozenset[str]] = {}
        for name in self._files:
            path = PurePosixPath(name)
            if path.suffix == ".py":
                parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
                for start in range(self._top(path) + 1):
                    self._named[".".join(parts[start:])].add(name)
            elif path.suffix not in _PROSE:
                for above in path.parents:
                    self._beside[str(above)].add(name)
                    if str(above) == ".":
                        break

    def _top(self, path: PurePosixPath) -> int:
        """Return the number of directories above a module's outermost package."""
        directory = path.parent
        while directory.name and str(directory / "__init__.py") in self._files:
            directory = directory.parent
        return len(directory.parts)

    def behind(self, path: str) -> frozenset[str]:
        """Return the files that the file at `path` depends on, itself included."""
        found: set[str] = set()
        waiting = [path, *(str(above / "conftest.py") for above in PurePosixPath(path).parents)]
        while waiting:
            name = waiting.pop()
            if name not in found and name in self._files:
                found.add(name)
                waiting += self._imported(name)
        paths = [PurePosixPath(name) for name in found]
        directories = {str(one.parent) for one in paths if one.name not in ("conftest.py", "__init__.py")}
        at_top = {name for name in self._beside["."] if "/" not in name}
        return frozenset(found.union(at_top, *(self._beside.get(one, ()) for one in directories)))

    def _imported(self, name: str) -> frozenset[str]:
        if name not in self._direct:
            packages = {str(above / "__init__.py") for above in PurePosixPath(name).parents}
            meant = {file for one in set(self._names(name)) for file in self._meant(one)}
            self._direct[name] = frozenset(meant | (packages & self._files))
        return self._direct[name]

    def _names(self, name: str) -> Iterator[str]:
        try:
            tree = ast.parse((self._root / name).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return
        package = PurePosixPath(name).parent.parts
        is_test = PurePosixPath(name).name.startswith(("test", "conftest.")) or name.endswith("_test.py")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = list(package[: len(package) - node.level + 1]) if node.level else []
                base += [node.module] if node.module else []
                yield ".".join(base)
                yield from (".".join([*base, one.name]) for one in node.names)
            elif isinstance(node, ast.Assign) and "pytest_plugins" in ast.unparse(node.targets[0]):
                yield from (str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant))
            elif (
                is_test
                and isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and _DOTTED.fullmatch(node.value)
            ):
                yield node.value.partition(":")[0]

    def _meant(self, dotted: str) -> Iterator[str]:
        """Yield the module of that name, or the one that contains it, and the packages around it."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            yield from self._named.get(".".join(parts[:end]), ())
