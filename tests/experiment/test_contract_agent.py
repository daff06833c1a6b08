"""Trials of an experiment over the providers of this host: what the agent is given, and what is kept of it."""

from __future__ import annotations

import errno
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from job_files import make_task
from rollout.model.errors import AttemptError
from rollout.objects.tree import describe, upload
from rollout.workloads.experiment.contracts import AgentTask, EvidenceRecord, TrialInput, TrialOutcome
from rollout.workloads.job.record import TrialRecord
from rollout.workloads.job.results import TrialError
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.trials import workspace
from rollout_worker.trials.blobs import Blobs
from trial_rig import Rig, job, rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "a-secret-of-nobody"
RESULT = "$AGENTLAB_RESULT_PATH"
# What agents of the tests have: `leave JSON` writes a result with the ids of the task.
AGENT = r"""
leave() {
  ids=$(python3 -c 'import json,os; print(json.dumps(json.load(open(os.environ["AGENTLAB_TASK_PATH"]))["ids"]))')
  printf '{"schema_version":"agent_result_v1","ids":%s,%s}' "$ids" "$1" > "$AGENTLAB_RESULT_PATH"
}
eval "$(python3 -c 'import json,os; print(json.load(open(os.environ["AGENTLAB_TASK_PATH"]))["task"]["script"])')"
"""
GRADE = """
mkdir -p /logs/verifier
cd /agentlab/contract/workspace
{grader}
code=$?
echo $code > /logs/verifier/grader_exit_code
[ -e /logs/verifier/grade.json ] && cp /logs/verifier/grade.json /logs/verifier/reward.json
exit $code
"""
TOML = '[environment]\nworkdir = "/agentlab/contract/workspace"\nmemory_mb = 256\nstorage_mb = 2000\n'
GOOD = 'leave \'"outcome":"success","answer":42,"metrics":{"steps":3,"solved":true}\''
PASSED = 'echo \'{"score": 1, "style": 0.5}\' > /logs/verifier/grade.json'


class Bench:
    """A started executor over one provider, with an agent that runs the script of its task."""

    def __init__(self, trials: Rig, directory: Path) -> None:
        self.trials = trials
        self._directory = directory
        self._made = 0

    def task(self, grader: str = PASSED, toml: str = TOML) -> Path:
        self._made += 1
        files = {"tests/test.sh": GRADE.format(grader=grader)}
        return make_task(self._directory / f"task-{self._made}", toml, files=files)

    async def trial(
        self,
        script: str,
        grader: str = PASSED,
        *,
        agent: str = "contract",
        toml: str = TOML,
        predecessor: Trial | None = None,
        **keys: Any,
    ) -> Trial:
        index = self._made
        given = {
            "schema_version": "trial_input_v1",
            "schedule_index": index,
            "ids": {"trial_id": f"trial_{index + 1:06d}", "variant_id": "a", "task_id": "t-1", "repl_idx": 0},
            "task": {"script": script},
            "policy": {"timeout_ms": 60_000, "sandbox": {"mode": "process"}},
            **keys,
        }
        before = None if predecessor is None else predecessor.record
        task = self.task(grader, toml)
        record = await self.trials.trial(task, agent=agent, contract=given, predecessor=before)
        return Trial(record, self.trials.files(record))


class Trial:
    def __init__(self, record: TrialRecord, files: dict[str, str]) -> None:
        self.record, self.files = record, files

    @property
    def error(self) -> str | None:
        return self.record.result.error and self.record.result.error.type

    @property
    def outcome(self) -> TrialOutcome:
        return TrialOutcome.decode(self.files["contract/outcome.json"].encode())

    @property
    def evidence(self) -> EvidenceRecord:
        return EvidenceRecord.decode(self.files["evidence/evidence.json"].encode())

    def artifact(self, name: str) -> str:
        """What a reference of the evidence leads to."""
        ref = getattr(self.evidence.evidence, f"{name}_ref")
        digest = ref.rpartition("/")[2]
        return self.files[f"evidence/artifacts/{digest[:2]}/{digest}"]

    def paths(self, name: str) -> set[str]:
        return {row["path"] for row in json.loads(self.artifact(f"workspace_{name}"))["entries"]}


async def benches(provider: str) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="experiment-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIAL_TOKEN", SECRET)
        directory = Path(name)
        program = directory / "artifact" / "bin" / "agent"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho frozen > made.txt\n")
        program.chmod(0o755)
        artifact = (await describe(directory / "artifact")).id.hex()
        script = {"command": ["/bin/sh", "-c", AGENT]}
        frozen = {"command": ["/agentlab/agent/bin/agent"], "artifact": artifact}
        lost = {**frozen, "artifact": "0" * 64}
        kwargs: dict[str, Any] = {"contract": script, "hasty": script, "frozen": frozen, "lost": lost}
        agents = [
            {
                "name": label,
                "import_path": "rollout_worker.trials.agents.contract:ContractAgent",
                "kwargs": given,
                "env": {"TOKEN": "${TRIAL_TOKEN}"},
                "override_timeout_sec": 4 if label == "hasty" else 60,
            }
            for label, given in kwargs.items()
        ]
        config = job(provider, *agents, environment={"provider_config": {"image": "host"}})
        async with rig(config, directory / "rig", make_task(directory / "first")) as trials:
            try:
                await trials.provider.probe()
            except SandboxRefusedError as error:
                pytest.skip(str(error))
            await upload(directory / "artifact", trials.objects)
            yield Bench(trials, directory)
            assert trials.boxes() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=("process", "bubblewrap"))
async def each(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async for bench in benches(request.param):
        yield bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async for bench in benches("process"):
        yield bench


async def test_a_trial_leaves_its_outcome_its_grade_and_whole_evidence(each: Bench) -> None:
    trial = await each.trial(f"echo said; echo new > made.txt; {GOOD}", grader=f"grep -q new made.txt && {PASSED}")
    assert (trial.error, trial.record.rewards) == (None, {"score": 1.0, "style": 0.5})
    outcome = trial.outcome
    assert (outcome.outcome, outcome.exit_status, outcome.grade_exit_status) == ("success", 0, 0)
    assert outcome.metrics == {"steps": 3.0, "solved": 1.0}
    evidence = trial.evidence
    assert (evidence.runtime.executor, evidence.runtime.exit_status) == ("local_process", 0)
    assert evidence.evidence.incomplete is None
    assert (trial.artifact("stdout"), trial.paths("pre"), trial.paths("post")) == ("said\n", set(), {"made.txt"})
    assert "+new" in trial.artifact("patch_incremental")
    assert trial.artifact("grade") == trial.files["verifier/grade.json"]
    assert trial.artifact("trial_output") == trial.files["contract/result.json"]


async def test_the_agent_is_given_the_task_of_the_contract(bench: Bench) -> None:
    script = 'cp "$AGENTLAB_TASK_PATH" /logs/agent/task.json; env | grep AGENTLAB_ | sort > /logs/agent/env; pwd >&2;'
    trial = await bench.trial(script + GOOD, bindings={"model": "m"})
    task = AgentTask.decode(trial.files["agent/task.json"].encode())
    assert (task.bindings, task.ids.run_id, task.policy.timeout_ms) == ({"model": "m"}, "run-1", 60_000)
    assert TrialInput.decode(trial.files["contract/trial_input.json"].encode()).agent_task() == task
    variables = dict(line.split("=", 1) for line in trial.files["agent/env"].splitlines())
    assert variables["AGENTLAB_TIMEOUT_MS"] == "60000"
    assert (variables["AGENTLAB_TRIAL_ID"], variables["AGENTLAB_VARIANT_ID"]) == (task.ids.trial_id, "a")
    assert trial.files["agent/stderr.txt"] == "/agentlab/contract/workspace\n"


async def test_hook_events_are_kept(bench: Bench) -> None:
    line = '{"event_type":"step"}'
    trial = await bench.trial(f"echo '{line}' > $AGENTLAB_EVENTS_PATH; {GOOD}")
    assert trial.files["contract/events.jsonl"] == trial.artifact("hook_events") == line + "\n"


async def test_the_frozen_artifact_is_staged(each: Bench) -> None:
    trial = await each.trial("", agent="frozen")
    assert (trial.paths("post"), trial.outcome.exit_status) == ({"made.txt"}, 0)


async def test_an_agent_that_was_never_started_has_evidence_that_says_so(bench: Bench) -> None:
    trial = await bench.trial(GOOD, agent="lost")
    refs = trial.evidence.evidence
    assert (trial.error, trial.outcome.outcome, refs.workspace_pre_ref) == ("agent_install_failed", "error", None)
    assert (refs.incomplete or "").startswith("agent_install_failed")


# What an agent may leave instead of a result


@pytest.mark.parametrize(
    ("script", "error", "outcome"),
    [
        ("true", "agent_result_missing", "missing"),
        (f"printf '{{\"schema_version\":' > {RESULT}", "agent_result_invalid", "error"),
        (f": > {RESULT}", "agent_result_invalid", "error"),
        (f"truncate -s 1G {RESULT}", "agent_result_invalid", "error"),
        ('leave \'"outcome":"success","metrics":{"loss":NaN}\'', "agent_result_invalid", "error"),
        ('leave \'"outcome":"success","metrics":{"loss":1e999}\'', "agent_result_invalid", "error"),
        ('leave \'"outcome":"splendid"\'', "agent_result_invalid", "error"),
        ('leave \'"outcome":"success","surprise":1\'', "agent_result_invalid", "error"),
        (f"{GOOD}; sed -i s/trial_0/trial_9/ {RESULT}", "agent_result_invalid", "error"),
        (f"{GOOD}; mv {RESULT} elsewhere; ln -s $PWD/elsewhere {RESULT}", "agent_result_invalid", "error"),
        (f"ln -s /etc/passwd {RESULT}", "agent_result_invalid", "error"),
        (f"mkdir {RESULT}", "agent_result_invalid", "error"),
        (f"mkfifo {RESULT}", "agent_result_invalid", "error"),
        (f"rm -rf $(dirname {RESULT})", "agent_result_missing", "missing"),
        (f"{GOOD}; exit 3", "agent_execution_failed", "success"),
        ("kill -9 $$", "agent_execution_failed", "error"),
        ('leave \'"outcome":"error","error":{"message":"no"}\'', "agent_execution_failed", "error"),
    ],
)
async def test_a_result_that_cannot_be_used_is_typed(bench: Bench, script: str, error: str, outcome: str) -> None:
    trial = await bench.trial(script)
    assert (trial.error, trial.outcome.outcome) == (error, outcome)
    assert trial.record.rewards == {"score": 1.0, "style": 0.5}  # it is graded all the same
    assert trial.evidence.evidence.workspace_post_ref is not None
    assert len(trial.files.get("contract/result.json", "")) <= 16 << 20


async def test_of_events_beyond_the_bound_the_first_are_kept(each: Bench) -> None:
    many = "for line in range(17): print(json.dumps({'event_type': 'e', 'n': line, 'text': 'x' * (1 << 20)}))"
    trial = await each.trial(f'python3 -c "import json\n{many}" > "$AGENTLAB_EVENTS_PATH"; {GOOD}')
    lines = trial.files["contract/events.jsonl"].splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(15))
    assert any("events.jsonl" in remark for remark in trial.record.remarks)


async def test_an_agent_that_hangs_leaves_its_evidence(bench: Bench) -> None:
    trial = await bench.trial("echo before > made.txt; sleep 1000", agent="hasty")
    assert (trial.error, trial.outcome.exit_status) == ("agent_execution_timeout", None)
    assert trial.paths("post") == {"made.txt"}


async def test_a_secret_is_in_nothing_that_is_kept(bench: Bench) -> None:
    trial = await bench.trial(
        f"echo $TOKEN > made.txt; echo $TOKEN > $TOKEN; ln -s $TOKEN link; {GOOD}; echo $TOKEN; cat {RESULT}"
    )
    assert SECRET not in json.dumps(trial.files)
    assert "***" in trial.artifact("patch_incremental")


# Grades


@pytest.mark.parametrize(
    ("grade", "error", "code"),
    [
        ("echo '{\"score\": NaN}' > /logs/verifier/grade.json", "verifier_reward_invalid", 0),
        ('echo \'{"score": "good"}\' > /logs/verifier/grade.json', "verifier_reward_invalid", 0),
        ("printf '{\"score\":' > /logs/verifier/grade.json", "verifier_reward_invalid", 0),
        ("echo '{\"style\": 1}' > /logs/verifier/grade.json", "verifier_reward_invalid", 0),
        ('echo \'{"score": 0, "score": 1}\' > /logs/verifier/grade.json', "verifier_reward_invalid", 0),
        ('echo \'{"score": 0, "": 1}\' > /logs/verifier/grade.json', "verifier_reward_invalid", 0),
        (f'[ "$AGENTLAB_TASK_ID/$AGENTLAB_VARIANT_ID" = t-1/a ] && {PASSED}', None, 0),
        ("false", "verifier_reward_missing", 1),
        ("pythonn3 grade.py", "verifier_not_runnable", 127),
        ("/etc", "verifier_not_runnable", 126),
        (f"{PASSED}; (exit 7)", None, 7),
    ],
)
async def test_a_grade_that_cannot_be_used_is_typed(bench: Bench, grade: str, error: str | None, code: int) -> None:
    trial = await bench.trial(GOOD, grader=grade)
    assert (trial.error, trial.outcome.grade_exit_status, trial.outcome.outcome) == (error, code, "success")
    assert trial.files["verifier/grader_exit_code"] == f"{code}\n"
    assert trial.evidence.evidence.incomplete is None


async def test_a_grade_that_is_a_list_is_refused_with_the_name_of_what_is_missing(bench: Bench) -> None:
    trial = await bench.trial(GOOD, grader="echo '[1]' > /logs/verifier/grade.json")
    message = (trial.record.result.error or TrialError(type="", message="")).message
    assert trial.error == "verifier_reward_invalid" and '"score"' in message


async def test_a_failed_grader_is_named_with_its_exit_code_and_its_last_words(bench: Bench) -> None:
    trial = await bench.trial(GOOD, grader="echo cannot divide >&2; (exit 7)")
    message = (trial.record.result.error or TrialError(type="", message="")).message
    assert "$AGENTLAB_GRADE_PATH" in message and "exit code 7: cannot divide" in message
    assert "reward" not in message


async def test_a_payload_that_is_no_trial_input_is_refused(bench: Bench) -> None:
    with pytest.raises(AttemptError) as raised:
        await bench.trials.attempt(bench.task(), agent="contract", contract={"ids": {}})
    assert (raised.value.error_code, raised.value.retry) == ("bad_payload", False)


# Chains


def chain(position: int, policy: str = "persist_per_task") -> dict[str, Any]:
    return {"chain_id": "a/t-1", "state_policy": policy, "position": position}


@pytest.mark.parametrize("policy", ["persist_per_task", "accumulate"])
async def test_a_trial_of_a_chain_begins_with_what_its_predecessor_left(each: Bench, policy: str) -> None:
    first = await each.trial(
        f"mkdir d; echo one > d/kept; echo x > gone; ln -s d/kept link; chmod 755 d/kept; {GOOD}",
        chain=chain(0, policy),
    )
    script = f"cat link; stat -c %a d/kept; rm gone; echo two >> d/kept; {GOOD}"
    second = await each.trial(script, predecessor=first, chain=chain(1, policy))
    assert second.files["agent/stdout.txt"] == "one\n755\n"
    assert second.artifact("workspace_pre") == first.artifact("workspace_post")
    assert second.paths("post") == {"d", "d/kept", "link"}
    incremental, cumulative = (second.artifact(f"patch_{name}") for name in ("incremental", "cumulative"))
    assert "-x" in incremental and "gone" not in cumulative
    assert "+one\n+two" in cumulative and "+one" not in incremental
    third = await each.trial(f"cat d/kept; {GOOD}", predecessor=second, chain=chain(2, policy))
    assert third.files["agent/stdout.txt"] == "one\ntwo\n"
    assert third.evidence.evidence.diff_cumulative_ref != third.evidence.evidence.diff_incremental_ref


async def test_contents_beyond_what_is_kept_are_counted(bench: Bench) -> None:
    """003, edge case 9: evidence has a bound, and a trial that is beyond it does not fail."""
    trial = await bench.trial(f"truncate -s 1M large; echo x > small; {GOOD}", evidence={"kept_mb": 1})
    digests = {row["path"]: row["sha256"] for row in json.loads(trial.artifact("workspace_post"))["entries"]}
    kept = {name for name, digest in digests.items() if f"evidence/artifacts/{digest[:2]}/{digest}" in trial.files}
    assert kept == {"large"}
    assert "the contents of 1 files" in (trial.evidence.evidence.incomplete or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs commands as others")
async def test_what_a_chain_restores_is_the_agents_own(bench: Bench) -> None:
    toml = f'{TOML}[agent]\nuser = "nobody"\n'
    first = await bench.trial(f"mkdir d; echo one > d/f; {GOOD}", toml=toml, chain=chain(0))
    second = await bench.trial(f"echo two >> d/f; {GOOD}", toml=toml, predecessor=first, chain=chain(1))
    assert (first.error, second.error) == (None, None)
    assert "+two" in second.artifact("patch_incremental")


async def test_files_that_the_result_names_are_kept_first(bench: Bench) -> None:
    named = '\'"outcome":"success","artifacts":[{"path":"z"},{"path":"no"}],"checkpoints":[{"path":"c/"}]\''
    script = f"mkdir c; echo c > c/1; echo z > z; truncate -s 1M large; leave {named}"
    trial = await bench.trial(script, evidence={"kept_mb": 1})
    digests = {row["path"]: row.get("sha256", "") for row in json.loads(trial.artifact("workspace_post"))["entries"]}
    kept = {name for name, digest in digests.items() if f"evidence/artifacts/{digest[:2]}/{digest}" in trial.files}
    assert kept == {"c/1", "z"}
    assert "no, which the result names, was not copied" in (trial.evidence.evidence.incomplete or "")


async def test_isolated_trials_keep_the_contents_of_what_changed_only(bench: Bench) -> None:
    trial = await bench.trial(f"echo new > made.txt; {GOOD}")
    assert "evidence/chain.json" not in trial.files
    assert trial.evidence.evidence.diff_cumulative_ref == trial.evidence.evidence.diff_incremental_ref


async def test_a_predecessor_without_evidence_is_a_fault(bench: Bench) -> None:
    first = await bench.trial(GOOD)  # it was no trial of a chain
    trial = await bench.trial(GOOD, predecessor=first, chain=chain(1))
    assert trial.error == "task_invalid"


async def test_a_workspace_that_cannot_be_copied_is_never_handed_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await bench.trial(GOOD, chain=chain(0))
    monkeypatch.setattr(workspace, "SNAPSHOT_S", 0)
    alone = await bench.trial(GOOD)
    assert (alone.error, "was not copied" in (alone.evidence.evidence.incomplete or "")) == (None, True)
    assert (await bench.trial(GOOD, chain=chain(0))).error == "agent_execution_failed"
    assert (await bench.trial(GOOD, predecessor=first, chain=chain(1))).error == "environment_start_failed"


# Hostile workspaces


async def test_what_leads_out_of_the_workspace_is_not_copied(each: Bench) -> None:
    script = f"ln -s /etc/passwd out; ln -s /etc up; mkfifo pipe; mkdir in; ln -s ../in in/self; {GOOD}"
    trial = await each.trial(script)
    assert trial.paths("post") == {"in", "in/self"}
    left = json.loads(trial.artifact("workspace_post"))["left_out"]
    assert {row["path"] for row in left["entries"]} == {"out", "up", "pipe"}
    assert "root:" not in "".join(trial.files.values())


@pytest.mark.parametrize("script", ["rm -rf $PWD", "rm -rf $PWD; ln -s /etc $PWD", "rm -rf $PWD; echo x > $PWD"])
async def test_a_workspace_that_is_gone_is_an_empty_snapshot(bench: Bench, script: str) -> None:
    trial = await bench.trial(f"echo x > file; {GOOD}; W=$PWD; cd /; {script.replace('$PWD', '$W')}")
    manifest = json.loads(trial.artifact("workspace_post"))
    assert (trial.error, manifest["exists"], manifest["entries"]) == (None, False, [])


async def test_names_of_any_kind_are_kept(bench: Bench) -> None:
    name = 'a\nb\t"c\\ d é'
    trial = await bench.trial(f"echo x > {shlex.quote(name)}; {GOOD}")
    assert trial.paths("post") == {name}


async def test_names_and_links_that_are_no_text_are_kept_as_far_as_json_can(bench: Bench) -> None:
    trial = await bench.trial(f"echo x > $(printf 'a\\377'); ln -s $(printf '\\376') link; {GOOD}")
    assert (trial.error, trial.paths("post")) == (None, {"a\\xff"})
    left = json.loads(trial.artifact("workspace_post"))["left_out"]
    assert left == {"count": 1, "entries": [{"path": "link", "why": "a link that cannot be shown"}]}


async def test_names_that_become_one_name_are_no_fault_of_ours(bench: Bench) -> None:
    trial = await bench.trial(f"mkdir $(printf 'a\\377'); echo x > 'a\\xff'; {GOOD}")
    assert (trial.error, "was not copied" in (trial.evidence.evidence.incomplete or "")) == (None, True)


async def test_what_is_ignored_or_too_much_is_left_out_and_named(bench: Bench) -> None:
    script = (
        "mkdir -p node_modules/x .git own; echo x > node_modules/x/y; echo x > .git/HEAD; echo x > own/z;"
        f" truncate -s 3M large; echo x > kept; {GOOD}"
    )
    trial = await bench.trial(script, evidence={"ignore": ["own"], "file_mb": 2})
    assert trial.paths("post") == {"kept"}
    left = json.loads(trial.artifact("workspace_post"))["left_out"]
    why = {row["path"]: row["why"] for row in left["entries"]}
    assert why == {"node_modules": "ignored", ".git": "ignored", "own": "ignored", "large": "file_too_large"}
    assert json.loads(trial.artifact("diff_incremental"))["complete"] is False


@pytest.mark.slow
async def test_a_workspace_of_very_many_files_is_bounded(bench: Bench) -> None:
    script = f'python3 -c \'for i in range(200_000): open(f"f{{i}}", "w")\'; {GOOD}'
    trial = await bench.trial(script, evidence={"max_files": 1000})
    manifest = json.loads(trial.artifact("workspace_post"))
    assert (trial.error, len(manifest["entries"]), manifest["left_out"]["count"]) == (None, 1000, 199_000)
    assert len(manifest["left_out"]["entries"]) <= 1000


async def test_a_full_disk_while_evidence_is_stored_is_typed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """003, edge case 9: on the worker."""

    def full(self: Blobs, sha256: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Blobs, "keep", full)
    trial = await bench.trial(GOOD)
    assert (trial.error, "evidence/evidence.json" in trial.files) == ("evidence_storage_full", False)
