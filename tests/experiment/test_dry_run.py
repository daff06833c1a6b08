"""What a dry run of an experiment finds besides its file: models of other runs, and parameters of a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments import write
from rollout.cli.__main__ import app
from rollout.cli.program import command_of
from rollout.model.errors import ConfigError, NotFoundError
from rollout.workloads.experiment.workload import Experiment
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Checked
from rollout.workloads.resume import compare

PROCESS = {"sandbox": {"mode": "process"}}


def dry_run(directory: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    path = write(directory, **sections)
    monkeypatch.chdir(directory)
    command = ["experiment", "run", str(path), "--dry-run"]
    command_of(app, "rollout")(command, prog_name="rollout", standalone_mode=False)


@pytest.mark.parametrize("uri", ["run:unknown", "snapshot:abc"])
def test_a_model_of_a_run_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    engine = {"model": {"uri": uri}, "backend": {"kind": "mock"}}
    with pytest.raises(NotFoundError):
        dry_run(tmp_path, monkeypatch, variant_plan=[{"variant_id": "b", "engine": engine}])
    assert not (tmp_path / ".lab").exists()


def test_a_binding_that_is_no_parameter_of_the_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "solving.py").write_text("def solve(row, kk=1): ...\n")
    with pytest.raises(ConfigError, match=r"variant_plan\.0\.bindings\.k: .*did you mean kk") as caught:
        dry_run(tmp_path, monkeypatch, runtime={"function": "solving:solve", "policy": PROCESS})
    assert "experiment.yaml:" in caught.value.message


def test_an_experiment_that_changed_is_told_which_command_begins_another_run(tmp_path: Path) -> None:
    before, after = ({"experiment": {"dataset": {"digest": digest}}} for digest in "ab")
    with OutputDirectory.open(tmp_path / "run") as output, pytest.raises(ConfigError) as caught:
        compare(Experiment(), output, before, Checked(config=after, total=0))
    assert "runs_dir" not in caught.value.message and "rollout experiment run" in caught.value.message
