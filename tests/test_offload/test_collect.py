"""`pytest_runner.py collect`: what pytest found, as events."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_offload.suites import collect, write

ODD = ["a b", "x::y", "[z]", "ü", "new\nline", "'quoted\"", "-k", "$(id)"]
SUITE = f"""
import unittest
import pytest

@pytest.fixture(scope="module")
def shared(): return 1

@pytest.mark.slow
@pytest.mark.parametrize("value", {ODD!r})
def test_odd(value): pass

def test_module(shared): pass

class TestState:
    def test_one(self): pass

class TestMixed(unittest.TestCase):
    def test_unit(self): pass

class TestWide:
    def test_one(self): pass
    def test_two(self, shared): pass
"""


STATE = """
count = 0
def test_sets():
    global count
    count = 1
def test_reads(): assert count
"""


def test_cases_have_their_place_and_whom_they_share_fixtures_with(tmp_path: Path) -> None:
    events, done = collect(write(tmp_path, {"tests/test_a.py": SUITE, "tests/test_b.py": STATE}))
    assert done.returncode == 0
    cases = [event["case"] for event in events if "case" in event]
    assert events[-1] == {"collected": len(cases), "pytest": pytest.__version__, "rootdir": str(tmp_path)}
    assert len({case["id"] for case in cases}) == len(ODD) + 7
    assert cases[0]["line"] == 8 and cases[0]["file"] == "tests/test_a.py" and "slow" in cases[0]["markers"]
    scopes = {case["id"].partition("::")[2]: case["scope"] for case in cases if "test_odd" not in case["id"]}
    assert scopes == {
        "test_module": "tests/test_a.py",
        "TestState::test_one": "tests/test_a.py::TestState",
        "TestMixed::test_unit": "tests/test_a.py::TestMixed",
        "TestWide::test_one": "tests/test_a.py",
        "TestWide::test_two": "tests/test_a.py",
        "test_sets": "tests/test_b.py",
        "test_reads": "tests/test_b.py",
    }
    assert {case["scope"] for case in cases if "test_odd" in case["id"]} == {""}


def test_what_cannot_be_collected_is_told_beside_the_rest(tmp_path: Path) -> None:
    files = {
        "test_broken.py": "import not_there\n",
        "test_skipped.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
        "test_twice.py": "def test_a(): pass\n",
        "test_good.py": "def test_good(): pass\n",
        "pytest.ini": "[pytest]\naddopts = -n auto --dist loadfile -x --maxfail=1 -q -v --lf --junitxml=x.xml\n",
    }
    events, done = collect(write(tmp_path, files), "--keep-duplicates", ".", "test_twice.py", plugins=True)
    assert done.returncode == 0 and not (tmp_path / "x.xml").exists()
    assert [event["case"]["id"] for event in events if "case" in event] == ["test_good.py::test_good"]
    errors = {event["collect_error"]["id"]: event["collect_error"] for event in events if "collect_error" in event}
    assert errors.keys() == {"test_broken.py", "test_twice.py::test_a"}
    assert errors["test_broken.py"]["message"] == "ModuleNotFoundError: No module named 'not_there'"
    assert "import not_there" in errors["test_broken.py"]["details"]
    skips = [event["collect_skip"] for event in events if "collect_skip" in event]
    assert skips == [{"id": "test_skipped.py", "message": "not here"}]


def test_that_coverage_is_not_measured_is_told(tmp_path: Path) -> None:
    conftest = "def pytest_addoption(parser): parser.addoption('--cov', dest='cov_source', action='append')\n"
    files = {"plugin_of_cov.py": conftest, "pytest.ini": "[pytest]\naddopts = -p plugin_of_cov --cov src\n"}
    events, _ = collect(write(tmp_path, files | {"test_a.py": "def test_a(): pass\n"}))
    assert [event["note"].split()[0] for event in events if "note" in event] == ["--cov"]


@pytest.mark.parametrize(
    ("files", "arguments", "code", "words"),
    [
        ({}, ["--no-such-option"], 4, "--no-such-option"),
        ({}, ["nowhere.py"], 4, "nowhere.py"),
        ({"conftest.py": "import not_there\n"}, [], 4, "not_there"),
        ({"pluggy.py": "x = 1\n"}, [], 1, "pluggy.py has the name of a module"),
        ({"conftest.py": "import os\nos._exit(0)\n"}, [], 0, ""),
    ],
)
def test_a_fault_of_usage_is_told_in_the_words_of_pytest(
    tmp_path: Path, files: dict[str, str], arguments: list[str], code: int, words: str
) -> None:
    events, done = collect(write(tmp_path, files), *arguments)
    assert done.returncode == code and words in done.stdout + done.stderr
    assert not any("collected" in event for event in events)
