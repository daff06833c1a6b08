"""The shape of the code base: names of modules, docstrings, complete packages."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common/rollout", "coordinator/rollout_coordinator", "worker/rollout_worker")
SOURCES = sorted(p for pkg in PACKAGES for p in (ROOT / pkg).rglob("*.py") if "wire/v1" not in p.as_posix())
FORBIDDEN_NAMES = {"helpers.py", "utils.py", "util.py", "misc.py", "common.py"}


def test_modules_are_named_after_what_they_do() -> None:
    assert [path for path in SOURCES if path.name in FORBIDDEN_NAMES] == []


def test_every_module_says_what_it_is() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    assert [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_packages_are_typed() -> None:
    assert all((ROOT / pkg / "py.typed").exists() for pkg in PACKAGES)


def test_files_of_tests_have_names_of_their_own() -> None:
    """Pytest imports them by name alone: two of one name are an error of the whole run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
