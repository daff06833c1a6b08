"""An experiment as a job: agents, lanes, chains, policies and task directories."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
from experiments import resolved
from rollout.model.item import NewItem
from rollout.workloads.experiment.compile import Items, command_of, job_of, policies_of, write_trees
from rollout.workloads.experiment.contracts import TrialInput
from rollout.workloads.experiment.engines import resolve_engines
from rollout.workloads.experiment.resolve import Resolved
from rollout.workloads.job.errors import ERRORS, policy_of
from rollout.workloads.job.load_task import TaskUse, load_task
from rollout.workloads.job.retries import is_retried
from rollout.workloads.job.run_config import lanes
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.local_model import no_bucket

IMAGES: dict[str, Any] = {
    "runtime": {
        "command": ["agent"],
        "image": "base",
        "policy": {"sandbox": {"mode": "docker"}, "network": {"mode": "allowlist_enforced", "allowed_hosts": ["a.b"]}},
    },
    "variant_plan": [{"variant_id": "b", "image": "other"}],
}


def items(experiment: Resolved, directory: Path) -> list[NewItem]:
    trees = write_trees(experiment, directory, None)
    checksums = {key: checksum for key, (checksum, _) in trees.items()}
    found = Items(experiment, job_of(experiment), checksums)
    return [found.item(index) for index in range(len(found))]


def test_a_variant_is_an_agent_with_its_words_and_variables() -> None:
    job = job_of(
        resolved(
            runtime={
                "command": ["agent", "-v"],
                "env": {"A": "1", "B": "1"},
                "policy": {"timeout_ms": 1500, "sandbox": {"mode": "process", "resources": {"memory": "1G"}}},
            },
            variant_plan=[{"variant_id": "b", "args": ["--x"], "env": {"B": "2"}, "max_parallel_trials": 2}],
        )
    )
    first, second = job.agents
    assert (first.id, first.kwargs["command"], second.kwargs["command"]) == (
        "a",
        ["agent", "-v"],
        ["agent", "-v", "--x"],
    )
    assert (second.env, second.override_timeout_sec) == ({"A": "1", "B": "2"}, 1.5)
    assert [(lane.name, lane.max_in_flight) for lane in lanes(job)] == [("a", 0), ("b", 2)]
    assert job.environment.override_memory == "1G" and job.verifier.disable


def test_a_line_of_shell_takes_arguments() -> None:
    command = command_of("printf '%s,' one", ["two words", "$x"])
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "one,two words,$x,"


def test_no_failure_of_an_agent_or_grader_is_a_valid_reward_and_no_failed_agent_is_graded() -> None:
    job = job_of(resolved())
    for name, row in ERRORS.items():
        policy = policy_of(name, job.override_error_policy)
        if row.blame in ("agent", "verifier"):
            assert not policy.valid_reward
        if row.phase == "execute":
            assert not policy.graded


@pytest.mark.parametrize(
    ("retry_on", "retried"),
    [
        (["infrastructure", "api"], {"environment_lost", "api_overloaded"}),
        (["agent_execution_failed"], {"agent_execution_failed"}),
        ([], set[str]()),
    ],
)
def test_retry_on_says_which_errors_are_tried_again(retry_on: list[str], retried: set[str]) -> None:
    job = job_of(resolved(policy={"retry": {"retry_on": retry_on, "max_attempts": 4}}))
    tried = {"environment_lost", "api_overloaded", "agent_execution_failed"}
    found = {name for name in tried if is_retried(name, job.retry, job.override_error_policy)}
    assert (found if job.retry.max_attempts > 1 else set()) == retried
    assert job.retry.max_attempts == (4 if retried else 1)


def test_pruning_is_a_policy_of_the_engine() -> None:
    (policy,) = policies_of(resolved(policy={"pruning": {"max_consecutive_failures": 3}}).config)
    assert (policy.name, dict(policy.options)) == ("prune_lane", {"after": "3"})
    assert policies_of(resolved().config) == ()


def test_each_slot_is_an_item_that_names_its_trial(tmp_path: Path) -> None:
    found = items(resolved(design={"replications": 2}), tmp_path)
    specs = [TrialSpec.decode(item.payload) for item in found if isinstance(item.payload, bytes)]
    given = [TrialInput.of_payload(spec.contract or {}, "r") for spec in specs]
    assert len({item.id for item in found}) == len(found) == 12
    assert [one.schedule_index for one in given] == list(range(12))
    assert [(spec.agent, spec.task, spec.attempt) for spec in specs[:3]] == [
        ("a", "t0", 1),
        ("a", "t0", 2),
        ("b", "t0", 1),
    ]
    assert {item.spec.executor for item in found} == {"job"}
    assert [item.spec.lane for item in found[:3]] == ["a", "a", "b"]
    assert (given[2].bindings, given[2].task["n"], given[2].ids.trial_id) == ({"k": 2}, 0, "trial_000003")


def test_an_items_id_changes_with_what_changes_its_trial_and_with_nothing_else(tmp_path: Path) -> None:
    def first(name: str, **sections: Any) -> bytes:
        return items(resolved(**sections), tmp_path / name)[0].id

    one = first("1")
    assert first("2", design={"max_concurrency": 9}) == one
    assert first("3", variant_plan=[]) == one
    assert first("4", baseline={"variant_id": "a", "bindings": {"x": 1}}) != one
    assert first("5", runtime={"command": ["other"], "policy": {"sandbox": {"mode": "process"}}}) != one


@pytest.mark.parametrize(
    ("policy", "chains"),
    [
        ("isolate_per_trial", ["", "", "", ""]),
        ("persist_per_task", ["a/t0", "a/t0", "b/t0", "b/t0"]),
        ("accumulate", ["a", "a", "b", "b"]),
    ],
)
def test_trials_that_share_a_workspace_are_a_chain(tmp_path: Path, policy: str, chains: list[str]) -> None:
    found = items(resolved(design={"replications": 2}, policy={"state_policy": policy}), tmp_path)
    assert [item.spec.chain for item in found[:4]] == chains
    contract = TrialSpec.decode(found[1].payload if isinstance(found[1].payload, bytes) else b"").contract or {}
    assert (contract.get("chain") or {}).get("position") == (1 if chains[0] else None)


def test_each_image_is_a_task_directory(tmp_path: Path) -> None:
    trees = write_trees(resolved(**IMAGES), tmp_path, None)
    assert {image for image, _ in trees} == {"base", "other"}
    for (image, workspace), (checksum, path) in trees.items():
        task = load_task(path, TaskUse(verify=False)).task
        assert (task.environment.docker_image, task.environment.workdir, task.checksum) == (image, workspace, checksum)
        assert task.environment.network.mode == "allowlist" and task.environment.network.allowed_hosts == ("a.b",)


def test_each_task_may_bring_its_own_image_and_workspace(tmp_path: Path) -> None:
    runtime = {
        "command": ["agent"],
        "agent": {"image_source": "per_task", "artifact": "x"},
        "policy": {"sandbox": {"mode": "docker"}},
    }
    tasks = [{"task_id": "t", "image": "i", "workspace": "/w"}, {"task_id": "u", "image": "i"}]
    assert set(write_trees(resolved(tasks, runtime=runtime), tmp_path, None)) == {
        ("i", "/w"),
        ("i", "/agentlab/contract/workspace"),
    }


def test_the_grader_and_its_files_are_the_tests_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "expected").write_text("1")
    experiment = resolved(grading={"command": ["grade", "a b"], "assets": "assets"})
    ((_, path),) = write_trees(experiment, tmp_path / "trees", tmp_path / "assets").values()
    assert (path / "tests/assets/expected").read_text() == "1"
    script = (path / "tests/test.sh").read_text()
    assert "grade 'a b'\n" in script and subprocess.run(["sh", "-n", path / "tests/test.sh"], check=True)
    assert not job_of(experiment).verifier.disable


def test_a_grade_that_is_a_link_is_named_and_not_followed(tmp_path: Path) -> None:
    experiment = resolved(grading={"command": 'ln -s /etc/hostname "$AGENTLAB_GRADE_PATH"'})
    ((_, path),) = write_trees(experiment, tmp_path / "trees", None).values()
    script = (path / "tests/test.sh").read_text().replace("/logs/verifier", str(tmp_path))
    script = script.replace("cd /agentlab/contract/workspace", f"cd {tmp_path}")
    found = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert "grade.json is a link" in found.stderr and not (tmp_path / "reward.json").exists()


def test_a_variants_model_is_an_executor_of_its_own_and_part_of_its_trials(tmp_path: Path) -> None:
    def model(uri: str) -> dict[str, Any]:
        return {"model": {"uri": uri}, "backend": {"kind": "mock"}}

    plan = [{"variant_id": "b", "engine": model("m")}, {"variant_id": "c"}]
    policy = {"sandbox": {"mode": "process"}}
    experiment = resolved(
        baseline={"variant_id": "a", "engine": model("n")},
        variant_plan=plan,
        runtime={"command": ["agent"], "engine": model("m"), "policy": policy},
    )
    engines = resolve_engines(experiment.config, no_bucket)
    assert engines.executors == {"a": "infer:1", "b": "infer:2", "c": "infer:2"} and set(engines.config()) == {
        "infer:1",
        "infer:2",
    }
    checksums = {key: checksum for key, (checksum, _) in write_trees(experiment, tmp_path, None).items()}
    found = Items(experiment, job_of(experiment), checksums, engines)
    before = [found.item(index) for index in range(3)]
    specs = [TrialSpec.decode(cast("bytes", one.payload)) for one in before]
    assert {one.agent: one.engine for one in specs} == dict(engines.executors)
    engines.models["infer:1"] = "another"
    same = [found.item(index).id == one.id for index, one in enumerate(before)]
    assert same == [one.engine != "infer:1" for one in specs]
