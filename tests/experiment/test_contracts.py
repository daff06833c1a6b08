"""Each contract: what it takes, and each of its fields broken."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from rollout.model.errors import InputError
from rollout.workloads.experiment.contracts import SCHEMAS, HookEvent, RunControl, TrialInput, json_schema

IDS = {"run_id": "r", "trial_id": "trial_000001", "variant_id": "a", "task_id": "t", "repl_idx": 0}
REF = "artifact://sha256/" + "0" * 64
TIME = "2026-01-02T03:04:05.678Z"
SANDBOX_POLICY = {
    "timeout_ms": 1000,
    "network": {"mode": "allowlist_enforced", "allowed_hosts": ["a.example"]},
    "sandbox": {"mode": "process", "image": "i", "resources": {"cpus": 1}},
}
REFS = [
    *("trial_input_ref", "trial_output_ref", "workspace_pre_ref", "workspace_post_ref"),
    *("diff_incremental_ref", "diff_cumulative_ref", "patch_incremental_ref", "patch_cumulative_ref"),
    *("stdout_ref", "stderr_ref", "hook_events_ref", "grade_ref"),
]
EXAMPLES: dict[str, dict[str, Any]] = {
    "agent_task_v1": {
        "schema_version": "agent_task_v1",
        "ids": IDS,
        "task": {"id": "t"},
        "bindings": {"k": 1},
        "dependencies": {"services": {"db": {}}},
        "policy": SANDBOX_POLICY,
    },
    "agent_result_v1": {
        "schema_version": "agent_result_v1",
        "ids": IDS,
        "outcome": "success",
        "answer": {"any": ["thing"]},
        "metrics": {"loss": 0.5, "ok": True},
        "objective": {"name": "loss", "value": 0.5, "direction": "minimize"},
        "artifacts": [{"path": "a/b", "logical_name": "b", "mime_type": "text/plain"}],
        "checkpoints": [{"path": "c", "step": 1, "epoch": 0.5}],
        "error": {"error_type": "e", "message": "m", "stack": "s"},
    },
    "trial_input_v1": {
        "schema_version": "trial_input_v1",
        "schedule_index": 0,
        "ids": IDS,
        "task": {},
        "bindings": {},
        "dependencies": {"services": []},
        "policy": SANDBOX_POLICY,
        "workspace": "/w",
        "chain": {"chain_id": "c", "state_policy": "persist_per_task", "position": 0},
    },
    "trial_outcome_v1": {
        "schema_version": "trial_outcome_v1",
        "outcome": "error",
        "exit_status": 1,
        "grade_exit_status": 0,
        "answer_sha256": "0" * 64,
        "metrics": {},
        "objective": {"name": "o", "value": 1},
        "artifacts": [],
        "checkpoints": [],
        "error": {},
    },
    "evidence_record_v1": {
        "schema_version": "evidence_record_v1",
        "ids": IDS,
        "runtime": {"executor": "local_process", "exit_status": 0, "duration_ms": 1},
        "evidence": dict.fromkeys(REFS, REF),
        "paths": {"trial_dir": "d", "trial_input": "i", "trial_output": "o", "stdout": "s", "stderr": "e"},
    },
    "run_control_v2": {
        "schema_version": "run_control_v2",
        "run_id": "r",
        "status": "paused",
        "active_trials": {
            "trial_000001": {
                "worker_id": "w",
                "schedule_idx": 0,
                "variant_id": "a",
                "started_at": TIME,
                "control": {"phase": "p"},
            }
        },
        "pause": {"label": "l", "requested_at": TIME, "requested_by": "me"},
        "updated_at": TIME,
    },
    "schedule_progress_v1": {
        "schema_version": "schedule_progress_v1",
        "run_id": "r",
        "total_slots": 1,
        "next_schedule_index": 1,
        "next_trial_index": 1,
        "schedule": [{"variant_idx": 0, "task_idx": 0, "repl_idx": 0}],
        "completed_slots": [{"schedule_index": 0, "trial_id": "trial_000001", "status": "completed"}],
        "pruned_variants": [0],
        "consecutive_failures": {"0": 1},
        "use_container": False,
    },
    "run_manifest_v1": {
        "schema_version": "run_manifest_v1",
        "run_id": "r",
        "experiment_id": "e",
        "name": "n",
        "created_at": TIME,
        "resolved_digest": "0" * 64,
        "rollout_version": "1",
        "design": {"comparison": "paired", "order": "randomized", "replications": 1, "seed": 0, "max_concurrency": 1},
        "baseline": "a",
        "variants": [{"variant_id": "a", "baseline": True, "image": None, "bindings": {}}],
        "tasks": 1,
        "total_slots": 1,
        "state_policy": "isolate_per_trial",
        "primary_metric": {"name": "score", "direction": "maximize"},
        "thresholds": {"pass": 1.0, "non_inferiority_margin": None},
        "volatile_fields": ["run_id"],
    },
}
OPEN = {"task", "bindings", "services", "resources", "answer", "control"}
"""Objects of the user's own."""
MAPS = {"metrics", "active_trials", "consecutive_failures"}
"""Their keys are names, and their values the contract's."""
ANYTHING = {"answer", "services"}


def broken() -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}:{where}")
        for name, example in EXAMPLES.items()
        for where, value in _broken(example, "")
    ]


def _broken(value: Any, at: str) -> Any:
    """`value` with one field of a wrong type, or one key that is not known."""
    key = at.rpartition(".")[2]
    if isinstance(value, dict) and key not in OPEN:
        for name, inner in value.items():
            for where, other in _broken(inner, f"{at}.{name}" if at else name):
                yield where, {**value, name: other}
        if key not in MAPS:
            yield f"{at}.strange", {**value, "strange": 1}
    elif isinstance(value, list) and value and key not in OPEN:
        for where, other in _broken(value[0], f"{at}.0"):
            yield where, [other, *value[1:]]
    if at and key not in ANYTHING:
        yield at, "wrong" if isinstance(value, list) else ["wrong"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_whole_document_is_taken_and_written_again_the_same(name: str) -> None:
    read = SCHEMAS[name].of(EXAMPLES[name])
    assert SCHEMAS[name].decode(read.encode()) == read


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schema_takes_what_the_model_writes(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema(name))
    jsonschema.validate(SCHEMAS[name].of(EXAMPLES[name]).to_json(), json_schema(name))


@pytest.mark.parametrize(("name", "value"), broken())
def test_each_field_that_is_broken_is_refused(name: str, value: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        SCHEMAS[name].of(value)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'{"ids": {}', b'{"outcome": NaN}', b"\xff\xfe", b'{"a": 1, "a": 2}', b"[" * 100_000],
)
def test_bytes_that_are_no_object_are_refused(raw: bytes) -> None:
    with pytest.raises(InputError):
        SCHEMAS["agent_result_v1"].decode(raw)


def test_a_result_above_its_size_is_refused_unread() -> None:
    with pytest.raises(InputError, match="16 MiB"):
        SCHEMAS["agent_result_v1"].decode(b" " * (16 << 20) + b" ")


def test_all_faults_of_a_result_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        SCHEMAS["agent_result_v1"].of({**EXAMPLES["agent_result_v1"], "outcome": "won", "metrics": {"a": "b"}})
    assert "outcome: " in caught.value.message and "metrics.a: " in caught.value.message


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../b", ""])
def test_an_artifact_outside_of_the_workspace_is_refused(path: str) -> None:
    with pytest.raises(InputError):
        SCHEMAS["agent_result_v1"].of({**EXAMPLES["agent_result_v1"], "artifacts": [{"path": path}]})


def test_evidence_without_a_reference_says_why() -> None:
    example = EXAMPLES["evidence_record_v1"]
    refs = {key: value for key, value in example["evidence"].items() if key != "workspace_post_ref"}
    with pytest.raises(InputError):
        SCHEMAS["evidence_record_v1"].of({**example, "evidence": refs})
    SCHEMAS["evidence_record_v1"].of({**example, "evidence": {**refs, "incomplete": "the sandbox was lost"}})


def test_a_payload_gets_the_id_of_its_run() -> None:
    whole = TrialInput.of(EXAMPLES["trial_input_v1"])
    assert TrialInput.of_payload(whole.payload(), "other").ids.run_id == "other"
    with pytest.raises(InputError):
        TrialInput.of_payload({}, "other")


def test_what_stands_beside_the_type_of_an_event_is_its_payload() -> None:
    assert HookEvent.of({"event_type": "call", "tool": "ls"}).payload == {"tool": "ls"}
    with pytest.raises(InputError):
        HookEvent.of({"tool": "ls"})


def test_a_control_file_says_that_it_is_not_paused() -> None:
    assert RunControl.of({**EXAMPLES["run_control_v2"], "pause": None}).to_json()["pause"] is None
