"""A trial as its agent sees it: commands in the sandbox, until the deadline, with their output kept and shown."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.port import Finished
from rollout_worker.trials.agents.model_engine import ModelEngine
from rollout_worker.trials.agents.policy_address import Answering
from rollout_worker.trials.agents.policy_engine import PolicyEngine
from rollout_worker.trials.faults import faults
from rollout_worker.trials.making import Made
from rollout_worker.trials.masking import secrets_of
from rollout_worker.trials.port import Reply, TrialFault, UsageCount
from rollout_worker.trials.streams import Streams
from rollout_worker.trials.told import Told

DEADLINE, TIMEOUT, INSTRUCTION = "ROLLOUT_DEADLINE", "ROLLOUT_TIMEOUT_SEC", "ROLLOUT_INSTRUCTION_PATH"
"""Variables that tell an agent its deadline, in Unix seconds and in seconds from its start, and its instruction."""
_NO_TIME_S = 0.001


class TrialPlace:
    """The place of one trial; `begin` and `end` enclose a phase."""

    def __init__(self, told: Told, made: Made, usage: UsageCount) -> None:
        self.sandbox = made.sandbox
        self.usage = usage
        self.instruction_path = told.job.instruction_path
        self.workdir = made.workdir
        self.user: str | int | None = None
        self.env: Mapping[str, str] = told.environs.agent
        self.model_name = told.section.model_name
        self.base_url = told.section.base_url
        self.image_key = made.image_key
        self.deadline: float | None = None
        self.contract = told.contract
        self.commands = 0  # that run now
        self.limits_hit: set[str] = set()
        self.notes: list[str] = []
        self._told = told
        self._timeout_s: float | None = None
        self._streams: Streams | None = None
        self._at_deadline = ""
        self._works = False
        self._engine = told.engine(usage)

    @property
    def answering(self) -> Answering | None:
        """The model that commands of the sandbox query, if there is one."""
        return self._engine if isinstance(self._engine, ModelEngine | PolicyEngine) else None

    def begin(
        self, streams: Streams, timeout_s: float | None, at_deadline: str, user: str | None, *, works: bool
    ) -> None:
        """Begin a phase. `at_deadline` is the type of error if it exceeds `timeout_s`. `works` means that the agent
        works on its task, rather than being installed."""
        self._streams, self._timeout_s, self._at_deadline = streams, timeout_s, at_deadline
        self._works = works
        self.deadline = None if timeout_s is None else time.time() + timeout_s
        self.user = user

    def end(self) -> None:
        self._streams, self.deadline, self._timeout_s = None, None, None

    def overdue(self) -> TrialFault:
        return TrialFault(self._at_deadline, f"it had not ended after {self._timeout_s:g} s")

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
        if self._streams is None:
            raise TrialFault("agent_execution_failed", "the agent's time is over: what it began may not go on")
        self._told.masks.hide(secrets_of(env or {}))  # what an agent was given by the worker itself
        left = None if self.deadline is None else max(_NO_TIME_S, self.deadline - time.time())
        most = min((limit for limit in (left, timeout_s) if limit is not None), default=None)
        self.commands += 1
        try:
            with faults("environment_lost", "the agent's command ran", by_agent=self._works):
                finished = await self.sandbox.exec(
                    command,
                    env={**self._told_env(), **self.env, **(env or {})},
                    cwd=cwd or self.workdir,
                    user=self.user if user is None else user,
                    timeout_s=most,
                    stdin=stdin,
                    on_output=None if quiet else self._streams.feed,
                )
        finally:
            self.commands -= 1
        if finished.limit is not None:
            self.limits_hit.add(finished.limit)
        if finished.how == "timed_out" and most == left:
            raise self.overdue()
        return finished

    def _told_env(self) -> dict[str, str]:
        env = {INSTRUCTION: self.instruction_path}
        if self.deadline is not None and self._timeout_s is not None:
            env |= {DEADLINE: str(int(self.deadline)), TIMEOUT: f"{self._timeout_s:g}"}
        return env

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        return await self._engine.ask(messages, **sampling)

    async def tree(self, checksum: str) -> Path:
        return await self._told.tree(checksum)

    def progress(self, text: str) -> None:
        self._told.progress(text)

    def note(self, text: str) -> None:
        self.notes.append(text)
