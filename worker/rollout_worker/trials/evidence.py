"""Evidence of an experiment's trial: its workspace before and after, the changes, and the agent's result.

evidence = Evidence(told, contract) await evidence.before(made)          restore the predecessor's workspace, and take a
snapshot ...                                  the agent works, and is ended await evidence.after(made)           take
another snapshot, and read what the agent left in /agentlab/contract/out evidence.write(outcome)
contract/outcome.json, evidence/evidence.json, evidence/artifacts/...

Contents of files are kept if the agent changed them, and all contents if the next trial of a chain starts with them.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollout.workloads.experiment.contracts import (
    CONTRACT,
    AgentOutcome,
    AgentResult,
    ErrorReport,
    EvidencePaths,
    EvidenceRecord,
    EvidenceRefs,
    EvidenceRuntime,
    TrialOutcome,
    sha256_of,
)
from rollout.workloads.job.record import AGENT, VERIFIER
from rollout.workloads.json_form import canonical

from rollout_worker.sandboxes.port import MIB
from rollout_worker.trials.agent_result import EVENTS, MESSAGE_MAX, RESULT, bring_events, bring_result
from rollout_worker.trials.blobs import Blobs, storage
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.faults import faults
from rollout_worker.trials.making import Made, admin
from rollout_worker.trials.outcome import Outcome
from rollout_worker.trials.patches import patch
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.snapshots import Snapshot, compare, diff
from rollout_worker.trials.told import Told
from rollout_worker.trials.workspace import Workspace

_INPUT = "contract/trial_input.json"
_SETUP_S = 60.0
_EXECUTORS = {
    "process": "local_process",
    "bubblewrap": "local_process",
    "docker": "local_docker",
    "podman": "local_docker",
}


class Evidence:
    """The evidence of one trial. `remarks` are for the user while the run proceeds."""

    def __init__(self, told: Told, contract: Contracted) -> None:
        self.remarks: list[str] = []
        self._told, self._contract = told, contract
        self._scratch = told.files.parent
        self._blobs = Blobs(told.files, self._scratch / "blobs", told.masks)
        self._workspace = Workspace(contract, self._blobs, told.masks)
        self._start: str | None = None  # hashes of manifests: of the chain's beginning, and of this trial's
        self._before: str | None = None
        self._after: str | None = None
        self._result: AgentResult | None = None
        self._not_kept = 0
        chain = contract.input.chain
        self._is_chain = chain is not None and chain.state_policy != "isolate_per_trial"

    async def before(self, made: Made) -> None:
        """Take the snapshot before the agent works. Raises TrialFault."""
        self._told.progress("taking a snapshot of its workspace")
        sandbox, workspace = made.sandbox, self._workspace
        with storage(), faults("environment_start_failed", "its workspace was made"):
            await asyncio.to_thread(self._blobs.write, _INPUT, self._contract.input.encode())
            places = f"{CONTRACT}/in", f"{CONTRACT}/out", self._contract.input.workspace
            quoted = " ".join(map(shlex.quote, places))
            script = f"mkdir -p {quoted} && chmod 0777 {CONTRACT}/out"
            (await sandbox.exec(script, cwd="/", user=admin(sandbox), timeout_s=_SETUP_S)).check()
            self._start = self._before = await workspace.snapshot(sandbox)
            chain = await asyncio.to_thread(workspace.earlier)
            if chain is not None:
                if self._before is None:
                    raise TrialFault("environment_start_failed", "; ".join(workspace.remarks))
                self._start, left = chain
                user = self._told.task.steps[0].agent.user
                owner = None if made.is_root(user) else user or made.user
                await workspace.restore(sandbox, self._before, left, owner)
                self._before = await workspace.snapshot(sandbox)

    async def after(self, made: Made) -> None:
        """Take the snapshot after the agent worked. Raises TrialFault if the agent's result is unusable, the sandbox
        was lost or the disk is full."""
        self._told.progress("taking a snapshot of its workspace")
        with storage(), faults("environment_lost", "its workspace was copied", by_agent=True):
            self._after = await self._workspace.snapshot(made.sandbox)
            if self._after is None and self._is_chain:
                why = f"its workspace cannot be handed on: {self._workspace.remarks[-1]}"
                raise TrialFault("agent_execution_failed", why)
            if (why := await bring_events(made.sandbox, self._blobs, self._scratch)) is not None:
                self._workspace.remarks.append(why)
                self.remarks.append(why)
            if not self._contract.wants_result:
                return
            ids = self._contract.input.ids
            self._result = result = await bring_result(made.sandbox, ids, self._blobs, self._scratch)
        if result.outcome == "error":
            said = None if result.error is None else result.error.message or result.error.error_type
            raise TrialFault("agent_execution_failed", f"the agent reports an error: {said or 'it does not say which'}")

    # ---- what is kept

    def write(self, outcome: Outcome) -> None:
        """Write the evidence once the trial has ended in any way. Raises TrialFault if the disk is full. Blocking."""
        fault = outcome.error or next((step.error for step in outcome.steps if step.error is not None), None)
        try:
            with storage():
                self._blobs.write("contract/outcome.json", self._outcome(fault).encode())
                self._blobs.write("evidence/evidence.json", self._record(outcome, fault).encode())
        except TrialFault:
            self._blobs.drop()  # the record needs room, too
            raise
        finally:
            self._blobs.clear()

    def _outcome(self, fault: TrialFault | None) -> TrialOutcome:
        exit_status, grade = self._contract.exit_status, _exit_code(self._told.files / VERIFIER / "grader_exit_code")
        report = None if fault is None else ErrorReport(error_type=fault.type, message=fault.message[:MESSAGE_MAX])
        result = self._result
        if result is None:
            kind: AgentOutcome = "success" if fault is None else "error"  # it is of an agent that leaves none
            if fault is not None and fault.type == "agent_result_missing":
                kind = "missing"
            return TrialOutcome(outcome=kind, exit_status=exit_status, grade_exit_status=grade, error=report)
        return TrialOutcome(
            outcome=result.outcome,
            exit_status=exit_status,
            grade_exit_status=grade,
            answer_sha256=None if result.answer is None else sha256_of(canonical(result.answer)),
            metrics=result.metrics,
            objective=result.objective,
            artifacts=result.artifacts,
            checkpoints=result.checkpoints,
            error=result.error or report,
        )

    def _record(self, outcome: Outcome, fault: TrialFault | None) -> EvidenceRecord:
        refs = {**dict(self._files()), **dict(self._snapshots()), **dict(self._changes())}
        lacking = list(self._workspace.remarks)
        if self._not_kept:
            lacking.append(f"the contents of {self._not_kept} files were not kept: kept_mb is too small")
        if not {"trial_output_ref", "patch_cumulative_ref"} <= refs.keys():
            lacking.append("the agent left no result" if fault is None else f"{fault.type}: {fault.message}")
        ids = self._contract.input.ids
        trial = f"trials/{ids.trial_id}"
        return EvidenceRecord(
            ids=ids,
            runtime=EvidenceRuntime.model_validate(
                {
                    "executor": _EXECUTORS.get(self._told.provider.name, "remote"),
                    "exit_status": self._contract.exit_status,
                    "duration_ms": round(outcome.times.result()[0].agent_execution_sec * 1000),
                }
            ),
            evidence=EvidenceRefs.model_validate({**refs, "incomplete": "; ".join(lacking)[:MESSAGE_MAX] or None}),
            paths=EvidencePaths(
                trial_dir=trial,
                trial_input=f"{trial}/trial_input.json",
                trial_output=f"{trial}/result.json" if "trial_output_ref" in refs else None,
                stdout=f"{trial}/stdout.log" if "stdout_ref" in refs else None,
                stderr=f"{trial}/stderr.log" if "stderr_ref" in refs else None,
            ),
        )

    def _files(self) -> Iterator[tuple[str, str]]:
        """Yield references to the trial's files."""
        named = {
            "trial_input_ref": _INPUT,
            "trial_output_ref": RESULT,
            "stdout_ref": f"{AGENT}/stdout.txt",
            "stderr_ref": f"{AGENT}/stderr.txt",
            "hook_events_ref": EVENTS,
            "grade_ref": f"{VERIFIER}/grade.json",
        }
        for name, path in named.items():
            if (file := self._told.files / path).is_file():
                yield name, self._keep(file.read_bytes())
            elif path == _INPUT:
                yield name, self._keep(self._contract.input.encode())

    def _snapshots(self) -> Iterator[tuple[str, str]]:
        for name, manifest in (("workspace_pre_ref", self._before), ("workspace_post_ref", self._after)):
            if manifest is not None:
                yield name, self._blobs.keep(manifest)

    def _changes(self) -> Iterator[tuple[str, str]]:
        """Yield references to the differences of the snapshots, and keep the contents that they mention."""
        if self._start is None or self._before is None or self._after is None:
            return
        snapshots, changed, contents = self._workspace.snapshots, dict[str, None](), set[str]()
        after = snapshots[self._after]
        for name, first in (("incremental", self._before), ("cumulative", self._start)):
            before = snapshots[first]
            changes = compare(before, after)
            yield f"diff_{name}_ref", self._keep(diff(before, after, changes, (first, self._after)))
            pairs = [(path, before.entries.get(path), after.entries.get(path)) for path in changes.all]
            yield f"patch_{name}_ref", self._keep(patch(pairs, self._blobs.read))
            changed |= dict.fromkeys(entry.sha256 for _, *both in pairs for entry in both if entry is not None)
        chain = self._contract.input.chain
        if chain is not None and self._is_chain:
            for name in (self._start, self._after):
                contents |= {entry.sha256 for entry in snapshots[name].entries.values()}
            state = {
                "schema_version": "task_chain_state_v1",
                **chain.to_json(),
                "start_ref": self._blobs.keep(self._start),
                "post_ref": self._blobs.keep(self._after),
            }
            self._blobs.write("evidence/chain.json", canonical(state))
        self._keep_contents(contents, [*self._declared(after), *changed])

    def _declared(self, after: Snapshot) -> Iterator[str]:
        """Yield contents of the files that the agent's result names."""
        result = self._result
        for one in () if result is None else (*result.artifacts, *result.checkpoints):
            path = posixpath.normpath(one.path)
            found = [
                entry.sha256
                for name, entry in after.entries.items()
                if entry.kind == "file" and (name == path or name.startswith(f"{path}/"))
            ]
            if not found:
                self._workspace.remarks.append(f"{path}, which the result names, was not copied")
            yield from found

    def _keep_contents(self, begun_with: set[str], others: Sequence[str]) -> None:
        """Keep `begun_with`, which the next trial of a chain needs, and as many others as there is room for."""
        room = self._contract.input.evidence.kept_mb * MIB
        for content in (*begun_with, *(one for one in dict.fromkeys(others) if one not in begun_with)):
            path = self._blobs.path(content)
            if not path.is_file():  # a directory has none, and that of a link is in the manifest
                continue
            size = 0 if content in begun_with else path.stat().st_size
            if size > room:
                self._not_kept += 1
                continue
            room -= size
            self._blobs.keep(content)

    def _keep(self, data: bytes) -> str:
        return self._blobs.keep(self._blobs.put(data))


def check_grade(rewards: Mapping[str, float]) -> None:
    """Raise TrialFault if the grade of an experiment's trial has no score."""
    if "score" not in rewards:
        raise TrialFault(
            "verifier_reward_invalid", f"$AGENTLAB_GRADE_PATH has no score, but {', '.join(rewards)[:200]}"
        )


def _exit_code(path: Path) -> int | None:
    try:
        return int(path.read_text()[:10])
    except (OSError, ValueError):
        return None
