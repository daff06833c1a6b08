"""Where the run of an experiment goes."""

from __future__ import annotations

from pathlib import Path

from experiments import resolved
from rollout.workloads.experiment.commands.find_run import directory_for
from rollout.workloads.output import OutputDirectory


def test_a_directory_in_which_another_command_begins_is_not_passed_over(tmp_path: Path) -> None:
    experiment = resolved().json
    first = tmp_path / experiment["experiment"]["id"]
    with OutputDirectory.open(first):
        assert directory_for(experiment, tmp_path, "") == (first, True)
    first.mkdir()
    (first / "notes.txt").write_text("somebody's own")
    assert directory_for(experiment, tmp_path, "") == (first.with_name(f"{first.name}-2"), False)
    assert [one.name for one in first.iterdir()] == ["notes.txt"]
