"""Maps failures in a sandbox to the type of error with which the trial ends."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rollout_worker.sandboxes.errors import (
    SandboxEndedError,
    SandboxError,
    SandboxGoneError,
    SandboxProviderError,
    SandboxRefusedError,
)
from rollout_worker.trials.port import TrialFault

BY_AGENT = "agent_execution_failed"


@contextmanager
def faults(type: str, doing: str, *, by_agent: bool = False) -> Generator[None]:
    """Convert failures of a sandbox inside the block, while `doing` this, to an error of `type`, unless the sandbox is
    gone.

    `by_agent` means that the agent has worked in the sandbox, or that its output is handled here. Then a failure, and
    the end of the sandbox unless it came from outside, is the agent's own: it must not leave the denominator by it.
    """
    try:
        yield
    except SandboxGoneError as error:
        ended = by_agent and isinstance(error, SandboxEndedError)
        what = "the agent's work ended the sandbox" if ended else "the sandbox was lost"
        raise TrialFault(BY_AGENT if ended else "environment_lost", f"{what} while {doing}: {error.message}") from error
    except SandboxRefusedError as error:
        raise TrialFault(BY_AGENT if by_agent else "environment_start_failed", f"{doing}: {error.message}") from error
    except SandboxError as error:
        if by_agent and not isinstance(error, SandboxProviderError):
            raise TrialFault(BY_AGENT, f"the agent's work made it impossible: {doing}: {error.message}") from error
        raise TrialFault(type, f"{doing}: {error.message}") from error
