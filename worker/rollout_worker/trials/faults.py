"""From what goes wrong in a sandbox to the type of error that the trial ends with."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rollout_worker.sandboxes.errors import SandboxError, SandboxGoneError, SandboxRefusedError
from rollout_worker.trials.port import TrialFault


@contextmanager
def faults(type: str, doing: str) -> Generator[None]:
    """What a sandbox refuses or fails at here, `doing` this, is an error of `type`; unless the sandbox is gone."""
    try:
        yield
    except SandboxGoneError as error:
        raise TrialFault("environment_lost", f"the sandbox was lost while {doing}: {error.message}") from error
    except SandboxRefusedError as error:
        raise TrialFault("environment_start_failed", f"{doing}: {error.message}") from error
    except SandboxError as error:
        raise TrialFault(type, f"{doing}: {error.message}") from error
