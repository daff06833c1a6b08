"""Which tests are left out because nothing that they depend on was changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout.workloads.test.cases import Case, CaseResult, Outcome, Try
from rollout.workloads.test.history import History
from rollout.workloads.test.run_config import GroupConfig
from rollout.workloads.test.unchanged import Depends, keys_of

FILES = {
    "pyproject.toml": "",
    "README.md": "",
    "conftest.py": "pytest_plugins = ['plugin']\n",
    "lib/plugin.py": "",
    "src/shop/__init__.py": "",
    "src/shop/cart.py": "from . import prices\n",
    "src/shop/prices.py": "import json\n",
    "src/shop/data/prices.json": "{}",
    "src/shop/lazy.py": "",
    "lib/other.py": "",
    "tests/conftest.py": "",
    "tests/test_cart.py": "from shop.cart import total\nNAME = 'shop.lazy:run'\n",
    "tests/test_other.py": "def test(): import other\n",
    "tests/broken.py": "def (",
}
CASES = [Case(id=f"{file}::test", file=file) for file in ("tests/test_cart.py", "tests/test_other.py")]


def keys(root: Path, depends: Depends = "imports", *, args: tuple[str, ...] = ()) -> list[bytes]:
    groups = {"": GroupConfig(args=args, options={})}
    found = keys_of(CASES, depends, root, [], groups, {"provider": "local"})
    return [found["", case.id] for case in CASES]


@pytest.mark.parametrize(
    ("file", "affected"),
    [
        ("tests/test_cart.py", [True, False]),
        ("src/shop/cart.py", [True, False]),
        ("src/shop/prices.py", [True, False]),  # imported by what is imported
        ("src/shop/__init__.py", [True, False]),
        ("src/shop/lazy.py", [True, False]),  # named in a text
        ("src/shop/data/prices.json", [True, False]),
        ("lib/other.py", [False, True]),
        ("tests/conftest.py", [True, True]),
        ("conftest.py", [True, True]),
        ("lib/plugin.py", [True, True]),
        ("pyproject.toml", [True, True]),
        ("uv.lock", [True, True]),  # is new
        ("README.md", [False, False]),
        ("src/unrelated.py", [False, False]),
        ("tests/broken.py", [False, False]),
    ],
)
def test_what_a_change_affects(tmp_path: Path, file: str, affected: list[bool]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before, whole = keys(tmp_path), keys(tmp_path, "project")
    assert keys(tmp_path) == before and len({*before, *whole, *keys(tmp_path, args=("-v",))}) == 6
    (tmp_path / file).write_text(FILES.get(file, "") + "# changed")
    assert [one != now for one, now in zip(before, keys(tmp_path), strict=True)] == affected
    assert [one != now for one, now in zip(whole, keys(tmp_path, "project"), strict=True)] == [True, True]


def test_only_what_passed_is_remembered(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    passed, failed = Try(outcome=Outcome.PASSED), Try(outcome=Outcome.FAILED)
    tries = {"good": (passed,), "bad": (failed,), "flaky": (failed, passed), "skipped": (Try(outcome=Outcome.SKIPPED),)}
    results = [CaseResult(id=id, tries=made) for id, made in tries.items()]
    keys = {("", id): id.encode() for id in tries}
    history.record("r1", 1.0, results, keys)
    assert history.passed() == {b"good": "r1"}
    again = CaseResult(id="good", tries=(passed.model_copy(update={"cached": "r1"}),))
    history.record("r2", 2.0, [again], keys)
    assert history.passed() == {b"good": "r1"}
    assert {test.id: test.tries for test in history.tests()} == {"good": 1, "bad": 1, "flaky": 2, "skipped": 1}
