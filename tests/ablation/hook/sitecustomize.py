"""Applies the removals named in the environment to production modules as they are loaded, also to `-m MODULE`.

Only processes that a test starts while a safeguard is removed have this directory on their path.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

sys.path.append(str(Path(__file__).resolve().parent.parent))
import removal

sys.path.pop()


class EditingLoader(SourceFileLoader):
    """Never from a cached `.pyc`, and never into one."""

    def get_code(self, fullname: str) -> CodeType:
        source = removal.edited(Path(self.path).read_text(), WANTED[fullname])
        return compile(source, self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in WANTED or fullname in self.looking:
            return None
        self.looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking.discard(fullname)
        if spec is None or spec.origin is None:
            return None
        spec.loader = EditingLoader(fullname, spec.origin)
        return spec

    looking: set[str] = set()


WANTED = removal.by_module(removal.edits_of_environment())
if WANTED:
    sys.meta_path.insert(0, Finder())
