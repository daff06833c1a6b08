"""The built-in agent `shell-loop`: asks a model, runs the bash blocks of its answer, and shows it their output, until
the model says that it is done.

It uses plain text and no tools of the service, so it works with any chat model, including a small one on the cluster's
own engines. docs/agents.md has the protocol as the model is told it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rollout.workloads.job.agent_kinds import SHELL_LOOP, ShellLoopKwargs

from rollout_worker.sandboxes.errors import SandboxError, SandboxGoneError
from rollout_worker.sandboxes.output import Output
from rollout_worker.sandboxes.port import Finished
from rollout_worker.trials.agents.chat import REFUSAL, Answer, ChatEndpoint
from rollout_worker.trials.agents.trajectory import PATH, Trajectory
from rollout_worker.trials.port import Agent, Place, TrialFault, UsageCount

DONE_MARKER = "TASK_COMPLETE"
"""A line of an answer, alone and outside blocks, which says that the task is done."""
DEFAULT_KEY = "OPENAI_API_KEY"
_IDLE = 3
"""Number of consecutive answers without a block or the marker after which the model has given up."""
_ARGUMENT_BYTES = 100_000
"""Linux accepts 128 KiB in one argument; a longer block runs from a file."""
_SCRIPT = "/tmp/.rollout-block.sh"
_FENCE = re.compile(r"^(?P<tick>`{3,})[ \t]*(?:bash|sh|shell)[ \t]*\n(?P<body>.*?)^(?P=tick)`*[ \t]*$", re.M | re.S)
_OPEN = re.compile(r"^`{3,}[ \t]*(?:bash|sh|shell)[ \t]*\n", re.M)
_ANY_FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*[ \t]*$", re.M | re.S)

SYSTEM = """You solve a task in a Linux sandbox, by running commands. Nobody reads along, so ask no questions.

To act, put commands into blocks that begin with ```bash and end with ```. All blocks of your answer are run one after
another, each with {shell} in a new shell that starts in {workdir}: files stay from one block to the next, variables and
cd do not. A block that takes longer than {timeout:g} s is ended, and with it everything it started. No block can read
input from a terminal. You are then shown the exit code and the output of each; of long output the middle is left out.

Once the task is done and you have checked it, write {marker} on a line of its own, outside of a block."""

_NOTHING = (
    "Your answer had no ```bash block, so nothing was run. Write one, or, if the task is done, write "
    f"{DONE_MARKER} on a line of its own."
)
_CUT = "Your answer was cut off because it was too long, and nothing of it was run. Write shorter answers."


class ShellLoop(Agent):
    """Has one conversation for the whole trial: a step of a task continues that of the step before."""

    version = "1"

    def __init__(self, kwargs: ShellLoopKwargs) -> None:
        self._kwargs = kwargs
        self._shell = "bash"
        self._messages: list[dict[str, str]] = []
        self._trajectory: Trajectory | None = None
        self._turns = 0
        self._tokens = 0
        self._told_uncounted = False

    async def install(self, place: Place) -> None:
        """Find out which shell the sandbox has; nothing is installed."""
        found = await place.run("command -v bash", quiet=True)
        self._shell = "bash" if found.ok else "sh"

    async def execute(self, place: Place, instruction: str) -> None:
        trajectory = self._begin(place, instruction)
        async with self._endpoint(place) as endpoint:
            try:
                await self._converse(place, endpoint, trajectory)
            finally:  # also when time has run out
                with suppress(SandboxError):
                    await place.sandbox.write_file(PATH, trajectory.encode())

    def _begin(self, place: Place, instruction: str) -> Trajectory:
        trajectory = self._trajectory
        if trajectory is None:
            trajectory = self._trajectory = Trajectory(SHELL_LOOP, self.version, place.model_name)
            template = self._kwargs.system_prompt or SYSTEM
            text = template if self._kwargs.system_prompt else template.format(
                shell=self._shell, workdir=place.workdir, timeout=self._kwargs.command_timeout_sec, marker=DONE_MARKER
            )  # fmt: skip
            self._say(trajectory, "system", text)
        left = "" if place.deadline is None else f"\n\nYou have {_left(place.deadline)} for it."
        self._say(trajectory, "user", f"{instruction.strip()}{left}")
        return trajectory

    @asynccontextmanager
    async def _endpoint(self, place: Place) -> AsyncGenerator[ChatEndpoint | None]:
        """Yield the endpoint, or None if engines of this cluster are used."""
        if place.base_url is None:
            yield None
            return
        kwargs = self._kwargs
        name = kwargs.api_key_env or DEFAULT_KEY
        key = place.env.get(name) or os.environ.get(name, "")
        if not key and kwargs.api_key_env is not None:
            raise TrialFault("agent_authentication_failed", f"{name} is set neither in env nor on this worker")
        endpoint = ChatEndpoint(
            place.base_url, place.model_name or "", key=key, retries=kwargs.api_retries,
            timeout_s=kwargs.request_timeout_sec, progress=place.progress,
        )  # fmt: skip
        async with endpoint:
            yield endpoint

    async def _converse(self, place: Place, endpoint: ChatEndpoint | None, trajectory: Trajectory) -> None:
        idle = cut = 0
        while not self._used_up(place):
            answer = await self._ask(place, endpoint, trajectory)
            await _keep(place, trajectory)
            if answer.finish_reason in (REFUSAL, "content_filter"):
                raise TrialFault("agent_refused", f"the model refused: {answer.text[:500] or answer.finish_reason}")
            blocks = [found["body"] for found in _FENCE.finditer(answer.text)]
            done = says_done(answer.text)
            if answer.finish_reason == "length":
                cut += 1
                if cut > 1:
                    why = f"two answers in a row were cut off at {answer.output_tokens} tokens: raise max_tokens"
                    raise TrialFault("agent_output_tokens_exceeded", why)
                self._say(trajectory, "user", _CUT)
                continue
            cut = 0
            if not blocks and done:
                return
            idle = 0 if blocks else idle + 1
            if idle >= _IDLE:
                place.note(f"{SHELL_LOOP} ended: {_IDLE} answers in a row ran nothing and did not say {DONE_MARKER}")
                return
            if not blocks:
                self._say(trajectory, "user", _NOTHING)
                continue
            all_well, seen = await self._run(place, blocks, trajectory)
            if done and all_well:
                return
            self._messages.append({"role": "user", "content": seen})

    def _used_up(self, place: Place) -> bool:
        limit = self._kwargs.max_total_tokens
        why = ""
        if self._turns >= self._kwargs.max_turns:
            why = f"after max_turns, {self._kwargs.max_turns}"
        elif limit is not None and self._tokens >= limit:
            why = f"after {self._tokens} tokens, of max_total_tokens {limit}"
        if why:
            place.note(f"{SHELL_LOOP} ended {why}, before it said {DONE_MARKER}")
        return bool(why)

    async def _ask(self, place: Place, endpoint: ChatEndpoint | None, trajectory: Trajectory) -> Answer:
        """Ask the model, count its tokens, and add the answer to trajectory and conversation."""
        self._turns += 1
        parameters = self._parameters(endpoint is not None)
        if endpoint is None:
            reply = await place.ask(self._messages, **parameters)
            answer = Answer(reply.text, reply.finish_reason, reply.input_tokens, 0, reply.output_tokens)
        else:
            answer = await endpoint.ask(self._messages, parameters, deadline=place.deadline)
            place.usage.add(UsageCount(answer.input_tokens, answer.cached_tokens, answer.output_tokens))
        if not answer.counted and not self._told_uncounted:
            self._told_uncounted = True
            place.note("the endpoint does not say how many tokens it used: they are not counted")
        price = self._kwargs.price
        cost = answer.cost_usd
        if price is not None:
            cost = price.of(answer.input_tokens, answer.cached_tokens, answer.output_tokens)
        place.usage.add(UsageCount(cost_usd=cost))
        self._tokens += answer.input_tokens + answer.output_tokens
        self._messages.append({"role": "assistant", "content": answer.text})
        trajectory.answered(
            answer.text, reasoning=answer.reasoning, prompt_tokens=answer.input_tokens,
            cached_tokens=answer.cached_tokens, output_tokens=answer.output_tokens, cost=cost,
        )  # fmt: skip
        return answer

    def _parameters(self, over_http: bool) -> Mapping[str, Any]:
        kwargs = self._kwargs
        named = {
            "max_tokens": kwargs.max_tokens, "temperature": kwargs.temperature, "top_p": kwargs.top_p,
            "seed": kwargs.seed,
        }  # fmt: skip
        given = {key: value for key, value in named.items() if value is not None}
        return {**given, **kwargs.extra_body} if over_http else given

    async def _run(self, place: Place, blocks: list[str], trajectory: Trajectory) -> tuple[bool, str]:
        """Return (whether each block succeeded, what to show the model)."""
        trajectory.acts(blocks)
        seen: list[str] = []
        all_well = True
        for number, block in enumerate(blocks, 1):
            command = await self._command(place, block.replace("\0", ""))
            finished = await place.run(command, timeout_s=self._kwargs.command_timeout_sec)
            all_well = all_well and finished.ok
            text = self._shown(finished)
            trajectory.saw(number, text)
            seen.append(f"Block {number} of {len(blocks)}: {text}")
        if place.deadline is not None:
            seen.append(f"You have {_left(place.deadline)} left.")
        return all_well, "\n\n".join(seen)

    async def _command(self, place: Place, block: str) -> list[str]:
        """Return a command that merges both streams, so that the model sees lines in the order in which they were
        printed."""
        script = f"exec 2>&1\n{block}"
        if len(script.encode()) < _ARGUMENT_BYTES:
            return [self._shell, "-c", script]
        await place.sandbox.write_file(_SCRIPT, script.encode())
        return [self._shell, _SCRIPT]

    def _shown(self, finished: Finished) -> str:
        how = {
            "exited": f"exit code {finished.exit_code}",
            "signalled": f"ended by signal {finished.signal}",
            "timed_out": f"ended after {finished.duration_s:.0f} s, because it took too long",
        }[finished.how]
        if finished.limit is not None:
            how += f" (the sandbox's {finished.limit} limit was hit)"
        text = shortened(finished.stdout, self._kwargs.max_output_bytes)
        return f"{how}\n{text}" if text else f"{how}, no output"

    def _say(self, trajectory: Trajectory, role: str, text: str) -> None:
        self._messages.append({"role": role, "content": text})
        trajectory.said(role, text)


def says_done(text: str) -> bool:
    """Return whether the marker is on a line of its own, outside every fenced block."""
    outside = _ANY_FENCE.sub("", text)
    if (unclosed := _OPEN.search(outside)) is not None:
        outside = outside[: unclosed.start()]
    return any(line.strip().strip("*`") == DONE_MARKER for line in outside.splitlines())


def shortened(output: Output, limit: int) -> str:
    """Return head and tail, together at most `limit` bytes, with a mark where bytes are missing."""
    data = output.head + output.tail
    if not output.missing and len(data) <= limit:
        return data.decode(errors="replace").rstrip("\n")
    head, tail = data[: limit // 2], data[-(limit - limit // 2) :]
    left_out = output.size - len(head) - len(tail)
    mark = f"\n[... {left_out} bytes left out ...]\n"
    return head.decode(errors="replace") + mark + tail.decode(errors="replace").rstrip("\n")


async def _keep(place: Place, trajectory: Trajectory) -> None:
    try:
        await place.sandbox.write_file(PATH, trajectory.encode())
    except SandboxGoneError:
        raise
    except SandboxError as error:
        place.note(f"{PATH} cannot be written: {error.message}")


def _left(deadline: float) -> str:
    seconds = max(0.0, deadline - time.time())
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
