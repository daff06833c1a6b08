"""The agent of an experiment: a command that finds its task in a file, and leaves its result in another."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.workloads.experiment.contracts import EVENTS_FILE, RESULT_FILE, TASK_FILE

from rollout_worker.trials.agents.plain import check
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.port import Agent, Place, TrialFault

ARTIFACT = "/agentlab/agent"
"""Where the frozen artifact lies in the sandbox."""
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class ContractAgent(Agent):
    def __init__(
        self, *, command: Sequence[str], args: Sequence[str] = (), artifact: str | None = None, version: str = ""
    ) -> None:
        """`command` and `args` run without a shell. `artifact`: the id (hex) of an uploaded tree; one of a single
        archive (.tar, .tar.gz, ...) is unpacked."""
        self.version = version
        self._command = [*command, *args]
        self._artifact = artifact

    async def install(self, place: Place) -> None:
        """Stage the artifact, read-only as it was frozen."""
        if self._artifact is None:
            return
        tree = await place.tree(self._artifact)
        archive = await asyncio.to_thread(_archive, tree)
        if archive is None:
            await place.sandbox.upload(tree, ARTIFACT)
            return
        with TemporaryDirectory() as name:
            await asyncio.to_thread(_unpack, archive, Path(name))
            await place.sandbox.upload(Path(name), ARTIFACT)

    async def execute(self, place: Place, instruction: str) -> None:
        contract = place.contract
        if contract is None:
            raise TrialFault("task_invalid", "the trial is none of an experiment: it has no task of the contract")
        contract.wants_result = True
        await place.sandbox.write_file(TASK_FILE, contract.input.agent_task().encode())
        finished = await place.run(self._command, env=variables(contract), cwd=contract.input.workspace)
        contract.exit_status = finished.exit_code
        check(finished, Path(self._command[0]).name, "agent_execution_failed")


def variables(contract: Contracted) -> dict[str, str]:
    """What the command finds in its environment."""
    given = contract.input
    return {
        "AGENTLAB_TASK_PATH": TASK_FILE,
        "AGENTLAB_RESULT_PATH": RESULT_FILE,
        "AGENTLAB_EVENTS_PATH": EVENTS_FILE,
        "AGENTLAB_WORKSPACE": given.workspace,
        "AGENTLAB_AGENT_PATH": ARTIFACT,
        "AGENTLAB_TIMEOUT_MS": str(given.policy.timeout_ms),
        "AGENTLAB_RUN_ID": given.ids.run_id,
        "AGENTLAB_TRIAL_ID": given.ids.trial_id,
        "AGENTLAB_VARIANT_ID": given.ids.variant_id,
        "AGENTLAB_TASK_ID": given.ids.task_id,
        "AGENTLAB_REPL_IDX": str(given.ids.repl_idx),
    }


def _archive(tree: Path) -> Path | None:
    """The archive that is all of `tree`."""
    files = list(tree.iterdir())
    return files[0] if len(files) == 1 and files[0].is_file() and files[0].name.endswith(_ARCHIVES) else None


def _unpack(archive: Path, directory: Path) -> None:
    """TrialFault."""
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
    except tarfile.TarError as error:
        raise TrialFault("agent_install_failed", f"the artifact {archive.name} cannot be unpacked: {error}") from error
