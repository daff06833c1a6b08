"""The table of safeguards does not rot, and each removal is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import removal
from detection import ROOT
from removal import Edit, StaleEditError
from report import document
from run import DOCUMENT
from safeguard import Safeguard
from table import ALL, BY_NAME

RUN = Path(__file__).with_name("run.py")
NAMES = [one.name for one in ALL]
PART = 32
"""Safeguards of one test of the slow lane, a few minutes of one core."""
SEEDS = 60


def run(tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> dict[str, Any]:
    """What the runner found. In a process of its own: it forks, which one with threads must not."""
    found = tmp_path_factory.mktemp("ablation") / "rows.json"
    done = subprocess.run(
        [sys.executable, RUN, "--json", found, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found.read_text())


@pytest.mark.parametrize("one", ALL, ids=NAMES)
def test_a_row_points_at_code(one: Safeguard) -> None:
    for module, edits in removal.by_module(list(one.edits)).items():
        path, source = removal.source_of(module)
        changed = removal.edited(source, edits)
        assert changed != source
        compile(changed, str(path), "exec", dont_inherit=True)
    assert one.tests and one.protects.endswith(".")
    for node in one.tests:
        file, _, name = node.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert f"def {name.partition('::')[2].partition('[')[0] or name.partition('[')[0]}" in text or "class" in text
    assert not one.covered_by or (one.covered_by in BY_NAME and not BY_NAME[one.covered_by].covered_by)


def test_names_are_unique_and_the_document_has_them_all() -> None:
    assert len(set(NAMES)) == len(NAMES)
    text = (ROOT / "docs" / "ablations.md").read_text()
    assert [name for name in NAMES if f"\n| {name} |" not in text] == []


def test_an_edit_of_code_that_is_gone_is_an_error() -> None:
    for edit in (
        Edit("rollout_coordinator.core.results:no_such", "x", "y"),
        Edit("rollout_coordinator.core.results:take_group", "no such text", "y"),
        Edit("rollout_coordinator.no_such:f", "x", "y"),
    ):
        with pytest.raises(StaleEditError), removal.removed([edit]):
            pass


def test_a_removal_is_undone_and_reaches_processes() -> None:
    from rollout_coordinator.ledger import queries

    edit = Edit("rollout_coordinator.ledger.queries:FENCE", "epoch = :epoch AND ", "")
    before = queries.FENCE
    code = "from rollout_coordinator.ledger import queries; print(queries.FENCE)"
    with removal.removed([edit]):
        assert "epoch" not in queries.FENCE
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == queries.FENCE
    assert before == queries.FENCE and removal.ENVIRONMENT not in os.environ


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    found = run(tmp_path_factory, "--fast")
    assert found["baseline"] == []
    return {row["name"]: row for row in found["rows"]}


@pytest.mark.timeout(900)  # the fixture runs them all; about a minute of one core
@pytest.mark.parametrize("name", NAMES)
def test_a_removal_is_noticed(rows: dict[str, dict[str, Any]], name: str) -> None:
    row = rows[name]
    assert row["fault"] == ""
    if row["skipped"]:
        pytest.skip("its tests need databases or processes: `make test-slow`")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, len(NAMES), PART))
def test_every_test_and_the_simulation_notice(
    tmp_path_factory: pytest.TempPathFactory, testrun_uid: str, first: int
) -> None:
    only = [word for name in NAMES[first : first + PART] for word in ("--only", name)]
    found = run(tmp_path_factory, "--seeds", str(SEEDS), *only)
    assert len(found["rows"]) == len(NAMES[first : first + PART])
    assert found["baseline"] == []
    assert {row["name"]: row["fault"] for row in found["rows"] if row["fault"]} == {}
    record(testrun_uid, first, found["rows"])


def record(session: str, first: int, rows: list[dict[str, Any]]) -> None:
    """docs/ablations.md anew, by whichever part of a session is the last that passes."""
    parts = ROOT / "build" / f"ablations-{session}"
    parts.mkdir(parents=True, exist_ok=True)
    own = parts / f"{first}.json"
    own.with_suffix(".new").write_text(json.dumps(rows))
    own.with_suffix(".new").rename(own)
    known = {row["name"]: row for part in parts.glob("*.json") for row in json.loads(part.read_text())}
    if known.keys() == BY_NAME.keys():
        DOCUMENT.write_text(document(known, SEEDS))
