"""Module search of our processes: never in the current directory, and a user's code only in its own directory."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules in its own process.

    `-P` keeps the current directory off `sys.path`: a file there with the name of a standard module (random.py,
    queue.py) must not replace that module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


_LIBRARY = os.__file__.rpartition(os.sep)[0]


class _LibraryFirst:
    """Finds standard modules in the standard library, whatever else has their names."""

    _paths = [path for path in sys.path if path == _LIBRARY or path.endswith((".zip", f"{os.sep}lib-dynload"))]

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if path is None and name in sys.stdlib_module_names:
            if spec := PathFinder.find_spec(name, cls._paths):
                return spec
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)  # not on this platform
        return None


def import_from(directory: str) -> None:
    """Let this process import the user's modules in `directory`, before installed ones.

    A file there with the name of a standard module does not replace it, so that the packages that import the module
    keep working.
    """
    if _LibraryFirst not in sys.meta_path:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), _LibraryFirst)
    if directory not in sys.path:
        sys.path.insert(0, directory)
