"""The interface of an agent, and what its trial offers it.

An agent is a class made with `kwargs` of its section in job.yaml. `install` is called once per trial, `execute` once
per step. Whatever it does in the sandbox goes through `Place.run`, so that output is kept and shown, and everything
ends at the deadline. It counts in `place.usage` as it goes: a trial that runs out of time reports what was counted
until then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollout_worker.sandboxes.port import Finished, Sandbox
from rollout_worker.trials.contracted import Contracted


class TrialFault(Exception):
    """Ends the trial with an error of this type, one of `rollout.workloads.job.errors.ERRORS`.

    `retry_after_s` is what a service asked for.
    """

    def __init__(self, type: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class UsageCount:
    """Tokens and US dollars so far; None if the price is unknown."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    models: dict[str, UsageCount] = field(default_factory=dict[str, "UsageCount"])

    def add(self, more: UsageCount) -> None:
        self.input_tokens += more.input_tokens
        self.cached_tokens += more.cached_tokens
        self.output_tokens += more.output_tokens
        if more.cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + more.cost_usd
        for name, one in more.models.items():
            self.models.setdefault(name, UsageCount()).add(one)


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer. `finish_reason` is stop, length, ..."""

    text: str
    finish_reason: str
    input_tokens: int
    output_tokens: int


class Place(Protocol):
    """A trial as its agent sees it."""

    sandbox: Sandbox
    usage: UsageCount
    instruction_path: str  # where the instruction lies in the sandbox
    workdir: str
    user: str | int | None
    env: Mapping[str, str]  # of the agent's section, filled in
    model_name: str | None
    base_url: str | None
    image_key: str  # equal for trials whose sandboxes begin with the same files: what was installed in one is in all
    deadline: float | None  # of the phase, time.time(); None: there is none
    contract: Contracted | None  # of a trial of an experiment

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        quiet: bool = False,
    ) -> Finished:
        """Run a command in the sandbox, with `env` over the agent's own, at most until the phase's deadline.

        Output goes to the logs of the phase and is shown live, unless `quiet`. A timeout by `timeout_s` is returned
        like any other ending; the phase's deadline ends the agent itself. Raises TrialFault if the sandbox is gone.
        """
        ...

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        """Generate an answer with an engine of this cluster (`engine` of job.yaml), counted in `usage`. Raises
        TrialFault."""
        ...

    async def tree(self, checksum: str) -> Path:
        """Return a read-only directory of this host with an uploaded tree; `checksum` is its id in hex. Raises
        AttemptError."""
        ...

    def progress(self, text: str) -> None:
        """Report what the trial is doing. Text that begins with "waiting" means that nothing is running: Ctrl-C does
        not wait for it."""
        ...

    def note(self, text: str) -> None:
        """Add a sentence to the trial's record."""
        ...


class Agent(Protocol):
    """An agent. `version` is empty until it is known."""

    version: str

    async def install(self, place: Place) -> None:
        """Install the agent. Raises TrialFault; any other exception becomes `agent_install_failed`."""
        ...

    async def execute(self, place: Place, instruction: str) -> None:
        """Work on the instruction. Raises TrialFault; any other exception becomes `agent_execution_failed`."""
        ...
