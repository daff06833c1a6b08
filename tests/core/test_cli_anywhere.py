"""In which clusters a run or a snapshot is looked for, and in what order: by files alone, before anything is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout.cli.anywhere import Places, candidates_for_object, candidates_for_run, find_run
from rollout.cli.asking import once
from rollout.client.private import PrivateRun, private_runs, remember_private_run, states_below
from rollout.model.errors import NotFoundError
from rollout.model.ids import make_ulid

OBJECT = "abcdef" + "0" * 58


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run_in(output: Path, number: int, name: str = "", *, near: bool = True) -> str:
    """A private cluster as a command left it; `near`: with its run-id."""
    run_id = make_ulid(number, bytes(10))
    (state := output / ".rollout").mkdir(parents=True)
    for file in ("rollout.db", "coordinator.toml"):
        (state / file).touch()
    if near:
        (output / "run-id").write_text(run_id + "\n")
    remember_private_run(PrivateRun(run_id, name or output.name, state.resolve()))
    return run_id


def looked(text: str) -> tuple[list[str], list[str]]:
    said: list[str] = []
    found = candidates_for_run(Places(None, False, (Path(),), said.append), text)
    return [target.private.parent.name if target.private else target.addresses[0] for target in found], said


def test_the_nearest_of_a_name_comes_first_and_that_there_are_others_is_said(here: Path) -> None:
    run_in(here / "one", 1, "same")
    (here / "one" / ".run.json").touch()  # what it says is gone: the directory's name counts
    run_in(here.parent / "far" / "one", 2)
    found, said = looked("one")
    assert found[0] == "one" and len(found) == 2
    assert candidates_for_run(Places(None, False, (Path(),), print), "one")[0].private == Path("one/.rollout")
    assert said == ["note: 2 runs are named 'one'; this is about the nearest"]


def test_a_run_of_a_job_is_found_where_the_job_was_started(here: Path) -> None:
    run_id = run_in(here / "jobs" / "nightly", 1)
    assert looked(run_id)[0] == looked("nightly")[0] == ["nightly"]
    (here / "jobs" / ".old" / ".rollout").mkdir(parents=True)
    assert states_below(Path()) == [Path("jobs/nightly/.rollout")]


def test_a_run_is_found_by_its_id_from_anywhere_and_by_no_other_word(here: Path) -> None:
    run_id = run_in(here.parent / "far" / "out", 1, near=False)
    assert looked(run_id)[0] == looked(run_id.lower())[0] == ["out"]
    assert looked("other") == ([], [])


def test_a_cluster_that_was_named_is_the_only_one(here: Path) -> None:
    run_in(here / "out", 1)
    assert candidates_for_run(Places(None, True, (Path(),), print), "out") == []


def test_a_run_of_another_cluster_is_found_by_what_its_output_directory_says(here: Path) -> None:
    run_id = make_ulid(1, bytes(10))
    (here / "out").mkdir()
    (here / "out" / "run-id").write_text(run_id)
    origin = {"run_id": run_id, "authority": "", "cluster": "c", "addresses": ["h:1"], "tls_dir": "t", "why": ""}
    (here / "out" / ".cluster.json").write_text(json.dumps(origin))
    assert looked("out")[0] == ["h:1"]


@pytest.mark.parametrize("wanted", [OBJECT, OBJECT[:7], OBJECT[:3], "a"])
def test_only_clusters_that_may_hold_such_an_object_are_asked(here: Path, wanted: str) -> None:
    """On their disk, in either layout, or in a bucket, where nobody has looked."""
    for place, layout in (("with", "cas"), ("older", "")):
        run_in(here / place, 1)
        (shard := here / place / ".rollout" / "objects" / layout / OBJECT[:2] / OBJECT[2:4]).mkdir(parents=True)
        (shard / OBJECT).touch()
    run_in(here / "without", 2)
    run_in(here / "bucket", 2)
    (here / "bucket" / ".rollout" / "objects-id").write_text("01")

    def asked(beginning: str) -> list[str]:
        found = candidates_for_object(Places(None, False, (Path(),), print), beginning)
        return sorted(target.private.parent.name for target in found if target.private)

    assert asked(wanted) == ["bucket", "older", "with"]
    assert asked("abce") == ["bucket"]


@pytest.mark.parametrize("takes_dir", [True, False])
async def test_the_advice_names_options_that_the_command_has(here: Path, takes_dir: bool) -> None:
    with pytest.raises(NotFoundError, match="--coordinator HOST:PORT or --context NAME") as error:
        await find_run(Places(None, False, (Path(),), print, takes_dir), "nosuch")
    assert ("--dir" in error.value.message) == takes_dir


def test_that_a_coordinator_is_started_for_an_answer_is_said_once_in_a_command() -> None:
    said: list[str] = []
    tell = once(said.append)
    for text in ("looking in one", "starting", "looking in two", "starting"):
        tell(text)
    assert said == ["looking in one", "starting", "looking in two"]


def test_clusters_that_are_gone_are_forgotten(here: Path) -> None:
    run_in(here / "out", 1)
    (here / "out" / ".rollout" / "rollout.db").unlink()
    assert private_runs() == []
