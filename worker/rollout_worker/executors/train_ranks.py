"""The processes that train: one for each rank, all told the same, of which rank 0 answers.

They are apart from the executor's own process so that what libraries read at import is set before, and so that a
segment that is taken away is ended at once, whatever it does: the processes are killed, and start anew from a snapshot.
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
from rollout.processes.pipe import Pipe

from rollout_worker.backends.training.faults import LESS_MEMORY

T = TypeVar("T")
DIED_S = 5.0
"""A process that ended is known to have for so long after another lost its connection to it."""
LAST_WORDS_S = 0.2
"""What was said before the end is read for so long."""


class Ranks:
    """`start`, then `command` one at a time, `close`. `shape`: of the batches, for one that dies of them."""

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
            ours, theirs = socket.socketpair()
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._world),
                "LOCAL_WORLD_SIZE": str(self._world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            environment = os.environ | self._environment | (place if self._world > 1 else {})
            arguments = (str(theirs.fileno()), str(self._threads), str(os.getpid()))
            command = python_module("rollout_worker.backends.training.rank", *arguments)
            with theirs:
                self._processes.append(await Child.start(command, pass_fds=[theirs.fileno()], env=environment))
            lost.append(asyncio.Event())
            self._pipes.append(await Pipe(self._answered, lost[-1].set).over(ours))
        self._reading = asyncio.create_task(self._read(lost))

    async def command(
        self, patience_s: Callable[[], float | None] = lambda: None, /, **command: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """The answers of rank 0 to it, up to the one that says `done`; another command may be given meanwhile.

        AttemptError: one says why not, a rank died, also before, or there was no answer for `patience_s()` seconds
        (None: however long it takes).
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
        """What `work` returns. AttemptError: a rank died before; it is cancelled."""
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
        """To what every rank asked in the midst of a command."""
        for pipe in self._pipes:
            pipe.send_message(message)

    async def result(self, **command: Any) -> dict[str, Any]:
        """What the last answer says is done."""
        done: dict[str, Any] = {}
        async for answer in self.command(**command):
            done = answer.get("done", done)
        return done

    async def _why(self, error: dict[str, Any]) -> AttemptError:
        """Where one process has died, another may be the first to say that its connection is lost."""
        if self._world > 1 and error["code"] == "trainer_failed" and self._processes:
            ends = [asyncio.ensure_future(process.wait()) for process in self._processes]
            done, _ = await asyncio.wait(ends, timeout=DIED_S, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if done:
                return self._died()
        return AttemptError(error["message"], code=error["code"], retry=error["retry"])

    async def _read(self, lost: list[asyncio.Event]) -> None:
        """Until a rank ends or its socket does: then all who asked are told."""
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
        """Hands it to who asked."""
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
        """Kills them: what is worth keeping is in snapshots."""
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
    """Processes of this host that its kernel ended for want of memory, of a control group's too; 0 where it is not
    known."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text("utf-8").splitlines())
        return int(counts.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
