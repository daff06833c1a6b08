"""The agent of an experiment: a command that reads its task from a file, and writes its result to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from rollout.workloads.experiment.contracts import AGENT, EVENTS_FILE, RESULT_FILE, TASK_FILE

from rollout_worker.trials.agents.plain import check
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.port import Agent, Place, TrialFault


class ContractAgent(Agent):
    """`version` is the beginning of the artifact's id."""

    def __init__(self, *, command: Sequence[str], artifact: str | None = None) -> None:
        """`command` runs without a shell. `artifact` is the id (hex) of an uploaded tree."""
        if not command:
            raise ValueError("command is empty")
        self._command = list(command)
        self._artifact = artifact
        self.version = (artifact or "")[:12]

    async def install(self, place: Place) -> None:
        """Stage the artifact."""
        if self._artifact is not None:
            await place.sandbox.upload(await place.tree(self._artifact), AGENT)

    async def execute(self, place: Place, instruction: str) -> None:
        contract = place.contract
        if contract is None:
            raise TrialFault("task_invalid", "the trial is none of an experiment: it has no task of the contract")
        contract.wants_result = True
        await place.sandbox.write_file(TASK_FILE, contract.input.agent_task().encode())
        finished = await place.run(self._command, env=variables(contract), cwd=contract.input.workspace)
        contract.exit_status = finished.exit_code
        check(finished, PurePosixPath(self._command[0]).name, "agent_execution_failed")


def variables(contract: Contracted) -> dict[str, str]:
    """Return the command's environment variables."""
    given = contract.input
    return {
        "AGENTLAB_TASK_PATH": TASK_FILE,
        "AGENTLAB_RESULT_PATH": RESULT_FILE,
        "AGENTLAB_EVENTS_PATH": EVENTS_FILE,
        "AGENTLAB_WORKSPACE": given.workspace,
        "AGENTLAB_AGENT_PATH": AGENT,
        "AGENTLAB_TIMEOUT_MS": str(given.policy.timeout_ms),
        "AGENTLAB_RUN_ID": given.ids.run_id,
        "AGENTLAB_TRIAL_ID": given.ids.trial_id,
        "AGENTLAB_VARIANT_ID": given.ids.variant_id,
        "AGENTLAB_TASK_ID": given.ids.task_id,
        "AGENTLAB_REPL_IDX": str(given.ids.repl_idx),
    }
