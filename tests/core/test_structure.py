"""The shape of the code base: sizes of functions, complete packages, committed stubs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common/rollout", "coordinator/rollout_coordinator", "worker/rollout_worker")
SOURCES = sorted(p for pkg in PACKAGES for p in (ROOT / pkg).rglob("*.py") if "wire/v1" not in p.as_posix())
MAX_FUNCTION_LINES = 75
FORBIDDEN_NAMES = {"helpers.py", "utils.py", "util.py", "misc.py", "common.py"}


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_a_file_is_one_idea(path: Path) -> None:
    text = path.read_text()
    assert path.name not in FORBIDDEN_NAMES, "name the module after what it does"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), "a module needs a docstring"


def test_packages_are_typed() -> None:
    assert all((ROOT / pkg / "py.typed").exists() for pkg in PACKAGES)
