"""Ends a sandbox, and reports its cost and what is left of it."""

from __future__ import annotations

import structlog

from rollout_worker.sandboxes.errors import SandboxError, SandboxTeardownError
from rollout_worker.sandboxes.port import Sandbox
from rollout_worker.trials.outcome import TEARDOWN, Outcome
from rollout_worker.trials.port import TrialFault

log = structlog.get_logger()


async def end(sandbox: Sandbox, outcome: Outcome) -> None:
    """Remove everything of the sandbox, or add a remark to `outcome`. An earlier failure of the trial is not
    replaced."""
    try:
        await sandbox.destroy()
    except SandboxTeardownError as error:
        log.warning("sandbox_not_removed", sandbox=sandbox.name, error=error.message)
        if outcome.error is None:
            outcome.error = TrialFault(TEARDOWN, error.message)
    except SandboxError as error:  # it was lost before: there is nothing to remove
        log.warning("sandbox_not_removed", sandbox=sandbox.name, error=error.message)
    outcome.environment_cost_usd += sandbox.cost()
