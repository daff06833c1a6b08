"""experiment.yaml and its data set: what is wrong is told at its place, all at once; what is laid over it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from experiments import definition, write
from rollout.model.errors import ConfigError
from rollout.workloads.experiment.config import ExperimentConfig, load_experiment
from rollout.workloads.experiment.workload import Experiment
from rollout.workloads.port import check_only

PER_TASK = {"command": ["a"], "agent": {"image_source": "per_task"}, "policy": {"sandbox": {"mode": "docker"}}}


def faults(path: Path, **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, environ={}, **keys)
    return [line.strip() for line in caught.value.message.splitlines()]


def of_check(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_only(Experiment(), load_experiment(path, environ={}))
    return [line.strip() for line in caught.value.message.splitlines()]


def broken() -> list[Any]:
    wrong: dict[str, Any] = {
        "schema_version": "experiment_v9",
        "experiment": {"id": "a b"},
        "dataset": {"limit": 0},
        "design": {"comparison": "maybe", "replications": 0, "seed": -1, "order": "random", "max_concurrency": 0},
        "baseline": {"variant_id": "", "args": 3, "image": "", "env": 3, "bindings": [], "max_parallel_trials": 0},
        "runtime": {"image": "", "command": [], "workspace": "here", "agent": 3, "env": 3, "dependencies": 3},
        "grading": {"command": [], "assets": "", "timeout_ms": 0},
        "policy": {"state_policy": "x", "retry": {"retry_on": ["x"]}, "pruning": {"max_consecutive_failures": 0}},
        "primary_metric": {"name": "", "direction": "up", "passed_from": "x", "non_inferiority_margin": 0},
        "evidence": {"ignore": 3, "file_mb": 0, "workspace_mb": 0, "max_files": 0},
        "workers": {"count": 0},
        "runs_dir": "",
    }
    return [
        pytest.param(f"{section}.{key}" if key else section, value, id=f"{section}.{key}")
        for section, values in wrong.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    ]


@pytest.mark.parametrize(("key", "value"), broken())
def test_each_key_that_is_wrong_is_told_with_its_line(tmp_path: Path, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    whole = definition(grading={"command": "true"})
    sections = {section: {**whole.get(section, {}), name: value} if name else value}
    (found, *others) = faults(write(tmp_path, **{**whole, **sections}))
    assert not others and found.startswith(f"{tmp_path}/experiment.yaml:") and f": {key}" in found


def test_every_key_of_the_file_is_known_to_the_test_above() -> None:
    tested = {str(one.values[0]).partition(".")[0] for one in broken()}
    assert tested == set(ExperimentConfig.model_fields) - {"variant_plan"}


def test_an_unknown_key_gets_the_nearest_one_and_all_faults_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, design={"replication": 2}, runtime={"command": ["a"], "imagee": "x"})
    found = faults(path)
    assert found[0] == "3 problems:"  # docker, which is the default, needs an image
    assert any("design.replication" in line and '"replications"' in line for line in found)
    assert any("runtime.imagee" in line and '"image"' in line for line in found)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"variant_plan": [{"variant_id": "A"}]}, "variant_plan.0.variant_id"),
        ({"runtime": PER_TASK}, "runtime.agent.artifact"),
        ({"runtime": {"command": ["a"], "policy": {"sandbox": {"mode": "docker"}}}}, "runtime.image"),
        ({"design": {"order": "randomized"}, "policy": {"state_policy": "accumulate"}}, "policy.state_policy"),
        (
            {
                "runtime": {
                    "command": ["a"],
                    "agent": {"image_source": "per_task", "artifact": "."},
                    "policy": {"sandbox": {"mode": "local"}},
                }
            },
            "runtime.agent.image_source",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_told(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    (found, *others) = faults(write(tmp_path, **sections))
    assert not others and f": {key}: " in found


def test_assignments_and_a_file_lie_over_the_file_before_it_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path)
    over = tmp_path / "over.yaml"
    over.write_text("values: {design.replications: 5, baseline.bindings.k: [1], variant_plan.b.args: [x]}\n")
    config = load_experiment(path, over, ["design.replications=7", "experiment.name=n"], {"design.seed": 3}, environ={})
    assert (config.design.replications, config.design.seed, config.experiment.name) == (7, 3, "n")
    assert (config.baseline.bindings, config.variant_plan[0].args) == ({"k": [1]}, ["x"])


def test_what_is_wrong_with_overrides_is_told_at_their_place(tmp_path: Path) -> None:
    path = write(tmp_path)
    over = tmp_path / "over.yaml"
    over.write_text("values:\n  design.replications: 0\n  variant_plan.z.args: []\n  experiment.id.x: 1\n")
    found = faults(path, overrides=over, assignments=["design.seed=x", "nonsense"])
    assert f"{over}:2: design.replications" in "\n".join(found)
    assert any(line.startswith(f"{over}:3: values.variant_plan.z.args") for line in found)
    assert any(line.startswith(f"{over}:4: values.experiment.id.x") for line in found)
    assert any(line.startswith("--set design.seed: design.seed") for line in found)
    assert any(line.startswith("--set nonsense: ") for line in found)


def test_the_environment_lies_over_the_file(tmp_path: Path) -> None:
    config = load_experiment(write(tmp_path), environ={"ROLLOUT_DESIGN__REPLICATIONS": "4"})
    assert config.design.replications == 4


@pytest.mark.parametrize(
    ("tasks", "line"),
    [
        ([{"task_id": "a"}, {"task_id": "a"}], 2),
        ([{"task_id": "a"}, {}], 2),
        ([{"task_id": ""}], 1),
        ([[]], 1),
        ([{"task_id": 3}], 1),
    ],
)
def test_a_bad_task_is_told_with_its_line(tmp_path: Path, tasks: list[Any], line: int) -> None:
    (found, *others) = of_check(write(tmp_path, tasks))
    assert not others and found.startswith(f"{tmp_path}/tasks.jsonl:{line}: ")


def test_with_per_task_images_each_task_has_one(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "run").write_text("x")
    runtime = {**PER_TASK, "agent": {"image_source": "per_task", "artifact": str(tmp_path / "agent")}}
    tasks = [{"task_id": "a", "image": "i"}, {"task_id": "b"}, {"task_id": "c", "image": "i", "workspace": "here"}]
    found = of_check(write(tmp_path, tasks, runtime=runtime))
    assert [line.partition("tasks.jsonl:")[2][:2] for line in found if "tasks.jsonl" in line] == ["2:", "3:"]


@pytest.mark.parametrize("kind", ["empty", "no archive"])
def test_an_artifact_that_cannot_be_frozen_is_told_with_what_else_is_wrong(tmp_path: Path, kind: str) -> None:
    artifact = tmp_path / "agent"
    if kind == "empty":
        artifact.mkdir()
    else:
        artifact.write_text("nothing")
    runtime = {"command": ["a"], "agent": {"artifact": str(artifact)}, "policy": {"sandbox": {"mode": "process"}}}
    found = of_check(write(tmp_path, [{}], runtime=runtime))
    assert found[0] == "2 problems:"
    assert any(line.startswith("runtime.agent.artifact: ") for line in found)


def test_files_that_are_missing_are_told_beside_keys_that_are_wrong(tmp_path: Path) -> None:
    runtime = {"command": ["a"], "agent": {"artifact": str(tmp_path / "none")}, "policy": {"timeout_ms": 0}}
    path = write(tmp_path, runtime=runtime, grading={"command": "g", "assets": str(tmp_path / "none")})
    (tmp_path / "tasks.jsonl").unlink()
    found = faults(path)
    for key in ("dataset.path", "runtime.agent.artifact", "grading.assets", "runtime.policy.timeout_ms"):
        assert any(line.startswith(f"{path}:") and f": {key}: " in line for line in found), key


def test_a_limit_takes_the_first_tasks(tmp_path: Path) -> None:
    path = write(tmp_path, [{"task_id": "a"}, {"task_id": "b"}, "no task"], dataset={"path": "", "limit": 2})
    checked = check_only(Experiment(), load_experiment(path, environ={}))
    assert [task.task_id for task in checked.resolved.tasks] == ["a", "b"]


def test_faults_and_notes_name_the_experiments_keys_and_not_a_jobs(tmp_path: Path) -> None:
    policy = {"sandbox": {"mode": "process", "provider_config": {"x": 1}}}
    path = write(tmp_path, runtime={"command": ["a"], "policy": policy})
    found = "\n".join([*of_check(path), *Experiment().host_notes(load_experiment(path, environ={}))])
    assert "runtime.policy.sandbox.provider_config.x: " in found and "runtime.policy.sandbox.mode process" in found
    assert "environment" not in found
