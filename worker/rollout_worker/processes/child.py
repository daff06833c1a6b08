"""Daemon's side of its child processes: starts them, talks to them, captures their output, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from rollout.config.logging import redact_text
from rollout.model.errors import AttemptError, ProtocolError
from rollout.model.item import Failure
from rollout.processes.child import PIPE, Child
from rollout.processes.command import start as start_process
from rollout.processes.exits import exit_text
from rollout.processes.interpreter import python_module
from rollout.processes.pipe import Pipe, inherited_socket
from rollout.wire.v1 import common_pb2, work_pb2

from rollout_worker import session_events as ev
from rollout_worker.attempts import OUT_OF_MEMORY, AttemptKey, Held, held_to_wire
from rollout_worker.bounded_lines import lines_of
from rollout_worker.environment import child_environment
from rollout_worker.processes import guard
from rollout_worker.processes.frames import read_frame, read_question
from rollout_worker.processes.kinds import Kind
from rollout_worker.processes.memory import MemoryGroup, MemoryGroups, ran_out
from rollout_worker.processes.output import Output, Shipper

log = structlog.get_logger()

OUTPUT_WAIT_S = 1.0
STOP_GRACE_S = 10.0
GROUP_WAIT_S = 5.0  # no longer: where nobody reaps orphans, a group never ends
LAST_LINE = 300
KILLED_EARLY = "it was killed before it had started"


@dataclass(slots=True)
class Handlers:
    event: Callable[[ev.Event], None]
    request: Callable[[dict[str, Any]], Any]  # coroutine function: the value for a child's question
    secrets: Callable[[], Awaitable[dict[str, str]]]  # what the child may know, by name
    shipper: Shipper | None = None  # takes what it prints to the run


class Guard:
    """Process that kills what is left when this one is killed, and what must not continue when this one hangs."""

    def __init__(self, scratch: Path) -> None:
        command = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(scratch)]
        self._process = start_process(command, stdin=PIPE, group=True)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError as error:  # the kernel's own signal is left, on Linux
            log.error("guard_lost", error=str(error))

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def kill_at(self, group: int, time: float) -> None:
        """Kill a group at `time` of `guard.clock`; 0 cancels that."""
        self._tell(f"={group} {time:.3f}\n")

    def remove_groups(self, base: Path) -> None:
        """Remove the control groups below `base`, and `base`, at the end."""
        self._tell(f"/{base}\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait(timeout=30)


class ChildProcess:
    """One `rollout_worker.processes.runner`."""

    def __init__(
        self,
        start: ev.StartChild,
        scratch: Path,
        cache: Path,
        guard: Guard,
        handlers: Handlers,
        memory: MemoryGroups | None = None,
    ) -> None:
        self.number = start.child
        self.pid = 0
        self._plan = plan = start.plan
        self._devices = start.devices
        self._memory_bytes = plan.memory_mib << 20
        self._memory = memory
        self._group: MemoryGroup | None = None
        self._output = Output(self._log, time.monotonic(), self._printed, self._left_out)
        self._shipper = handlers.shipper
        self._run_id = plan.run.run_id  # the last that it was given rows of
        self._run_of: dict[int, str] = {}  # by log
        self._scratch = scratch
        self._cache = cache  # where the child reads slices of objects itself
        self._guard = guard
        self._handlers = handlers
        self._pipe = Pipe(self._frame, self._pipe_lost)
        self._pipe_gone = asyncio.Event()
        self._known_runs: dict[str, None] = {plan.run.run_id: None}
        self._child: Child | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._early: list[tuple[int, bytes]] | None = []
        self._asked_to_stop = False
        self._killed = False
        self.done = asyncio.Event()

    async def run(self) -> None:
        """Run the child from start to end. ChildEnded is always its last event; until then its slot and devices are in
        use."""
        reason, code = "it could not be started: an error of the worker's own, which its log has", ""
        try:
            reason, code = await self._run()
        except (OSError, ValueError) as error:  # ValueError: a NUL in a variable that the run's configuration sets
            reason, code = f"it could not be started: {error}", ""
        except AttemptError as error:  # what it needs from outside is not there: told in words, as of one that ran
            self._handlers.event(ev.ChildFailed(self.number, Failure(error.error_code, error.message, error.retry)))
            reason, code = error.message, ""
        except asyncio.CancelledError:  # the worker ends: nobody asks
            reason = ""
            raise
        finally:
            if self._group is not None:
                self._group.remove()
            self.done.set()
            if reason:
                self._handlers.event(ev.ChildEnded(self.number, reason, code))

    async def _run(self) -> tuple[str, str]:
        """Return how it ended, and the code of a failure whose cause is known."""
        # The operator's word counts more than what a run says: secrets last.
        secrets = await self._handlers.secrets()
        environment = child_environment(dict(self._plan.environment) | secrets)
        if self._devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
        if self._killed:
            return KILLED_EARLY, ""
        if self._memory_bytes and self._memory is not None:
            self._group = self._memory.make(self.number, self._memory_bytes)
        with inherited_socket() as (ours, fd):
            limit = [str(self._memory_bytes)] if self._memory_bytes and self._group is None else []
            child = self._child = await Child.start(
                python_module("rollout_worker.processes.runner", str(fd), str(os.getpid()), *limit),
                pass_fds=(fd,),
                group=True,
                env=environment,
                stdout=PIPE,
                stderr=PIPE,
            )
        self.pid = child.pid
        self._guard.add(child.pid)
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                self._group.add(child.pid)
        if self._killed:
            child.kill()
        output = [
            asyncio.create_task(self._output.capture("stdout", child.stdout)),
            asyncio.create_task(self._output.capture("stderr", child.stderr)),
        ]  # fmt: skip
        try:
            await self._pipe.over(ours)
            init = {
                "run": asdict(self._plan.run),
                "scratch": str(self._scratch),
                "cache": str(self._cache),
                "secrets": sorted(secrets),
            }
            self._pipe.send(Kind.INIT, json.dumps(init).encode())
            for kind, body in self._early or ():
                self._pipe.send(kind, body)
            self._early = None
            code = await child.wait()
            # What it said before it died counts; a grandchild may hold the socket open for ever, though.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pipe_gone.wait(), OUTPUT_WAIT_S)
        finally:
            child.kill()
            if self._devices:  # what it started may hold them a moment longer: the next finds their memory taken
                await child.group_gone(GROUP_WAIT_S)
            self._guard.remove(child.pid)
            self._pipe.abort()
            await asyncio.wait(output, timeout=OUTPUT_WAIT_S)
            for task in [*output, *self._tasks]:
                task.cancel()
            self._output.close()
        if self._asked_to_stop and code == 0:
            return "it stopped", ""
        words = last_line(self._output.last_words)
        said = f"; it said: {words}" if words and not self._asked_to_stop else ""
        return exit_text(code) + said, OUT_OF_MEMORY if self._ran_out() else ""

    def _ran_out(self) -> bool:
        if self._group is not None:
            return self._group.killed()
        return bool(self._memory_bytes) and ran_out(self._output.last_words)

    def kill(self) -> None:
        """Kill the child and all its descendants; one that is still starting ends as soon as it has started."""
        self._killed = True
        if self._child is not None:
            self._child.kill()

    def kill_at(self, time: float) -> None:
        """Let the guard kill it at `time`, even if this daemon is stopped or hangs; 0 cancels that."""
        if self.pid:
            self._guard.kill_at(self.pid, time)

    def stop(self) -> None:
        """Close the executor and end; the child is killed if that takes too long."""
        self._asked_to_stop = True
        self._send(Kind.STOP, b"")
        asyncio.get_running_loop().call_later(STOP_GRACE_S, lambda: None if self.done.is_set() else self.kill())

    # ---- to the child

    def _send(self, kind: int, body: bytes) -> None:
        if self._early is not None:
            self._early.append((kind, body))
        else:
            self._pipe.send(kind, body)

    def deliver(self, attempts: list[Held]) -> None:
        if attempts:
            self._run_id = attempts[-1].plan.run.run_id
            self._run_of.update((held.log, held.plan.run.run_id) for held in attempts)
        for group in held_to_wire(attempts, self._known_runs):
            self._send(Kind.ASSIGN, group.SerializeToString())

    def cancel(self, keys: list[AttemptKey]) -> None:
        for key in keys:
            message = common_pb2.AttemptKeys(log=key.log, seq=[key.seq], attempt=[key.attempt])
            self._send(Kind.CANCEL, message.SerializeToString())

    def recall(self, keys: list[AttemptKey]) -> None:
        by_log: dict[int, common_pb2.AttemptKeys] = {}
        for key in keys:
            message = by_log.setdefault(key.log, common_pb2.AttemptKeys(log=key.log))
            message.seq.append(key.seq)
            message.attempt.append(key.attempt)
        for message in by_log.values():
            self._send(Kind.RECALL, message.SerializeToString())

    def leave(self, budget_s: float) -> None:
        self._send(Kind.LEAVE, json.dumps({"budget_s": budget_s}).encode())

    def hold(self, on: bool) -> None:
        self._send(Kind.HOLD, json.dumps({"on": on}).encode())

    def pass_children(self, results: work_pb2.ChildResults) -> None:
        self._send(Kind.CHILDREN, results.SerializeToString())

    def relay(self, frame: work_pb2.WorkDown) -> None:
        self._send(Kind.RELAY, frame.SerializeToString())

    def resume(self, key: AttemptKey) -> None:
        message = work_pb2.Resume(log=key.log, seq=key.seq, attempt=key.attempt)
        self._send(Kind.RESUME, message.SerializeToString())

    # ---- from the child

    def _pipe_lost(self) -> None:
        """Kill a child that closed its socket or broke the framing but lives on: it would keep its attempts forever."""
        self._pipe_gone.set()
        asyncio.get_running_loop().call_later(STOP_GRACE_S, lambda: None if self.done.is_set() else self.kill())

    def _frame(self, kind: int, body: bytes) -> None:
        """Handle a frame. A ProtocolError kills this child only."""
        try:
            if kind == Kind.REQUEST:
                self._ask(read_question(body))
                return
            event = read_frame(self.number, kind, body)
            if isinstance(event, ev.ChildFailed):
                self.stop()
                event = self._with_root_cause(event)
            self._handlers.event(event)
        except ProtocolError as error:
            log.error("child_broke_protocol", child=self.number, kind=kind, error=str(error))
            self.kill()

    def _with_root_cause(self, event: ev.ChildFailed) -> ev.ChildFailed:
        """Add the root cause: an engine of several processes says of a process's failure only that there was one."""
        words = last_error(self._output.last_words) if "root cause" in event.failure.message else ""
        if not words:
            return event
        return replace(event, failure=replace(event.failure, message=f"{event.failure.message} ({words})"))

    def _ask(self, question: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: dict[str, Any]) -> None:
        reply = {"id": question["id"], **await self._handlers.request(question)}
        self._send(Kind.REPLY, json.dumps(reply).encode())

    def _printed(self, stream: str, line: str, key: AttemptKey | None) -> None:
        if self._shipper is not None:
            run_id = self._run_of.get(key.log, self._run_id) if key is not None else self._run_id
            self._shipper.add(run_id, self._plan.run.executor, stream, line, key)

    def _left_out(self, log: int, lines: int, size: int) -> None:
        if self._shipper is not None:
            run_id = self._run_of.get(log, self._run_id)
            self._shipper.left_out(run_id, self._plan.run.executor, lines, size)

    def _log(self, level: str, event: str, fields: dict[str, Any]) -> None:
        getattr(log, level)(event, child=self.number, pid=self.pid, **fields)


def last_line(output: bytes) -> str:
    """Return the last line of a process's output, as its own explanation of its end."""
    return redact_text((lines_of(output) or [""])[-1])[:LAST_LINE]


_ERROR = re.compile(r"\b(?:[\w.]*(?:Error|Exception)): \S")


def last_error(output: bytes) -> str:
    """Return the last line that names an error, except those that refer to another."""
    lines = [line for line in lines_of(output) if _ERROR.search(line) and "root cause" not in line]
    return last_line("\n".join(lines).encode())
