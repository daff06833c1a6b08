"""Training processes: one per rank, all given the same commands, which rank 0 answers.

They are separate from the executor's process so that variables are set before libraries read them at import, and so
that a segment can be ended at any time: the processes are killed and restarted from a snapshot.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rollout.model.errors import AttemptError
from rollout.processes.child import Child
from rollout.processes.exits import how_ended
from rollout.processes.framing import MESSAGE
from rollout.processes.interpreter import python_module
from rollout.processes.pipe import Pipe, inherited_socket

from rollout_worker.backends.training.faults import LESS_MEMORY

T = TypeVar("T")
DIED_S = 5.0
"""Seconds within which a process's end is known after another lost its connection to it."""
LAST_WORDS_S = 0.2
"""Seconds for reading what a process said before its end."""


class Ranks:
    """The ranks: `start`, then `command` one at a time, `close`. `shape` is that of the batches, for a rank they
    kill."""

    def __init__(self, world: int, threads: int, environment: dict[str, str], shape: str = "") -> None:
        self._world = world
        self._threads = threads
        self._environment = environment
        self._processes: list[Child] = []
        self._pipes: list[Pipe] = []
        self._reading: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._number = 0
        self._shape = shape
        self._oom_kills = 0

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.code is None for process in self._processes)

    async def start(self) -> None:
        port = _free_port()
        self._oom_kills = _oom_kills()
        lost: list[asyncio.Event] = []
        for rank in range(self._world):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._world),
                "LOCAL_WORLD_SIZE": str(self._world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            environment = os.environ | self._environment | (place if self._world > 1 else {})
            with inherited_socket() as (ours, fd):
                arguments = (str(fd), str(self._threads), str(os.getpid()))
                command = python_module("rollout_worker.backends.training.rank", *arguments)
                self._processes.append(await Child.start(command, pass_fds=[fd], env=environment))
            lost.append(asyncio.Event())
            self._pipes.append(await Pipe(self._answered, lost[-1].set).over(ours))
        self._reading = asyncio.create_task(self._read(lost))

    async def command(
        self, patience_s: Callable[[], float | None] = lambda: None, /, **command: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the answers of rank 0 up to the one that says `done`; another command may be given meanwhile.

        Raises AttemptError if a rank reports an error, if a rank dies, also before, or if no answer comes within
        `patience_s()` seconds (None: no limit).
        """
        if self._reading is None or self._reading.done():  # nobody would be told any more
            raise self._died()
        self._number += 1
        number, answers = self._number, asyncio.Queue[dict[str, Any]]()
        self._open[number] = answers
        message = json.dumps({**command, "number": number}).encode()
        try:
            for pipe in self._pipes:
                pipe.send(MESSAGE, message)
            while True:
                answer = await _within(patience_s(), answers)
                if error := answer.get("error"):
                    raise await self._why(error)
                yield answer
                if "done" in answer:
                    return
        finally:
            del self._open[number]

    async def meanwhile(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. If a rank dies first, cancel it and raise AttemptError."""
        assert self._reading is not None
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._reading], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._died()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def reply(self, **message: Any) -> None:
        """Answer a question that every rank asked during a command."""
        for pipe in self._pipes:
            pipe.send_message(message)

    async def result(self, **command: Any) -> dict[str, Any]:
        """Return what the last answer reports as done."""
        done: dict[str, Any] = {}
        async for answer in self.command(**command):
            done = answer.get("done", done)
        return done

    async def _why(self, error: dict[str, Any]) -> AttemptError:
        """Return the true error: if a process died, another may be the first to report its lost connection."""
        if self._world > 1 and error["code"] == "trainer_failed" and self._processes:
            ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
            done, _ = await asyncio.wait(ends, timeout=DIED_S, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if done:
                return self._died()
        return AttemptError(error["message"], code=error["code"], retry=error["retry"])

    async def _read(self, lost: list[asyncio.Event]) -> None:
        """Read until a rank or its socket ends, then notify all callers."""
        reading = [asyncio.create_task(one.wait()) for one in lost]
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
        try:
            await asyncio.wait([*ends, *reading], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(ends, timeout=DIED_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(reading, timeout=LAST_WORDS_S)  # what it said before counts
        finally:
            for task in [*reading, *ends]:
                task.cancel()
            await asyncio.gather(*reading, *ends, return_exceptions=True)
        died = self._died()
        error = {"message": died.message, "code": died.error_code, "retry": True}
        for asked in self._open.values():
            asked.put_nowait({"error": error})

    def _answered(self, _: int, body: bytes) -> None:
        """Pass an answer to its caller."""
        answer = json.loads(body)
        if (asked := self._open.get(answer.pop("number"))) is not None:
            asked.put_nowait(answer)

    def _died(self) -> AttemptError:
        rank, code = next(
            ((rank, process.code) for rank, process in enumerate(self._processes) if process.code is not None),
            (0, None),
        )
        how = "broke its connection" if code is None else how_ended(code)
        if code == -signal.SIGKILL and _oom_kills() > self._oom_kills:
            return AttemptError(
                f"the process of rank {rank} {how} while the kernel ended processes for want of memory: out of memory "
                f"with minibatches of {self._shape}: {LESS_MEMORY}, or give the worker's host more memory",
                code="out_of_memory",
            )
        return AttemptError(f"the process of rank {rank} {how} while it trained", code="trainer_died")

    async def close(self) -> None:
        """Kill the ranks; snapshots have everything worth keeping."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            await process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading])
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._reading = [], [], None


async def _within(patience_s: float | None, answers: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(answers.get(), patience_s)
    except TimeoutError:
        raise AttemptError(
            f"the processes that train have said nothing for {patience_s:.0f} s: they hang, and are ended",
            code="trainer_hung",
        ) from None


def _oom_kills() -> int:
    """Return the number of this host's processes killed by the kernel for lack of memory, including in a control group;
    0 if not known."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text("utf-8").splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
