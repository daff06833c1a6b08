"""Feeds batches to one test process. A test that ends it costs only itself: the rest continues in a fresh one."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from rollout.workloads.test.cases import GOOD, OUTPUT_MAX, Outcome, Try
from rollout.workloads.test.frames import Kept, Splitter

from rollout_worker.testing.place import Place, Stream, TestProcess

COLLECT_LIMIT_S = 300.0
"""Seconds for importing a file, or the time limit of a test if that is longer."""
STACKS_WAIT_S = 1.0
CLOSE_S = 30.0
"""Seconds for ending session fixtures, or the time limit of a test if that is part of a batch."""
ENDING = "(fixtures of the session end)"
"""Name in place of the running test."""
LOST = 97
CLOSED = "it closed file descriptors that it did not open, and with them those of pytest's process, which was ended"
_STACKS = re.compile(r"^(Fatal Python error: |(Current t|T)hread 0x).*\n  File .*", re.DOTALL | re.MULTILINE)
_OF_PYTEST = re.compile(r"(?<=\n)  File \"[^\"\n]*/(_pytest|pluggy)/(?!.*\n(Current t|T)hread 0x).*", re.DOTALL)
"""Frames of what calls the test, from the first to the end."""


@dataclass(slots=True)
class Doing:
    """Progress of a batch: of `count` tests `done` have ended, and `id` has run since `began` (monotonic)."""

    count: int
    done: int = 0
    id: str = ""
    began: float = field(default_factory=time.monotonic)


class Host:
    """Runs one batch at a time. `words` is the command of the interpreter; `arguments` are pytest's."""

    def __init__(self, place: Place, words: Sequence[str], arguments: Sequence[str]) -> None:
        self._place = place
        self._words = tuple(words)
        self._arguments = tuple(arguments)
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def run(
        self,
        ids: Sequence[str],
        limit_s: float,
        doing: Callable[[Doing], None],
        tries: dict[str, Try],
        *,
        last: bool = False,
    ) -> None:
        """Add a try for each test to `tries` as it ends. Cancellation ends the process.

        `last` ends the session; a failure of its fixtures is then an error of the last test.
        """
        async with self._turn:
            now = Doing(len(ids))
            idle = 0  # processes in a row that did nothing
            while left := [one for one in ids if one not in tries]:
                before = len(tries)
                process = self._process = self._process or await self._start()
                try:
                    await process.batch(left, limit_s, tries, lambda: doing(now), now)
                except asyncio.CancelledError:
                    self._process = None
                    await process.kill()
                    raise
                if process.ended is not None:
                    self._process = None
                    process.blame(left, tries)
                idle = 0 if len(tries) > before else idle + 1
                if idle > 1:
                    tries[left[0]] = process.failed(f"its process ended before it began: {process.ended}")
            if last and self._process is not None:
                now.id, now.began = ENDING, time.monotonic()
                doing(now)
                await self._end(self._process, tries, max(limit_s, CLOSE_S) if limit_s else None)
                now.id = ""
                doing(now)

    async def _end(self, process: Process, tries: dict[str, Try], limit_s: float | None) -> None:
        try:
            fault = await process.end_session(limit_s)
        except asyncio.CancelledError:
            self._process = None
            await process.kill()
            raise
        if process.ended is not None:
            self._process = None
        if fault:
            at, made = list(tries.items())[-1]
            message = f"fixtures of the session failed at their end: {fault}"
            details = "\n".join(part for part in (made.details, process.fault_details or message) if part)[:OUTPUT_MAX]
            failed = {"details": details}
            if made.outcome in GOOD:
                failed |= {"outcome": Outcome.ERROR, "phase": "teardown", "message": message[:OUTPUT_MAX]}
            tries[at] = made.model_copy(update=failed)

    async def _start(self) -> Process:
        token = secrets.token_hex(8)
        words = [*self._words, self._place.runner, "run", token, *self._arguments]
        process = Process(token)
        try:
            await process.start(self._place, words)
        except OSError as error:
            process.ended = f"{words[0]} cannot be run: {error.strerror or error}"
        return process

    async def close(self) -> str:
        """Close the process; return what failed in session fixtures, or an empty string."""
        process, self._process = self._process, None
        return await process.close() if process is not None else ""


class Process:
    """A test process and its messages. `ended` says how it ended, or None."""

    def __init__(self, token: str) -> None:
        self.name = token[:8]
        self.ended: str | None = None
        self._pid = 0
        self._ready = False
        self._stopped = ""  # why pytest ended by itself
        self._fault = ""  # of fixtures of the session, at their end
        self.fault_details = ""
        self._closed = asyncio.Event()  # they have ended
        self._file = ""  # that is being collected
        self._id = ""  # of the test that runs
        self._started = 0.0  # Unix seconds
        self._began = 0.0
        self._hung = False
        self._verdicts: deque[Callable[[str], None]] = deque()  # of tests that ended, which still need their stderr
        self._stderr: deque[str] = deque()  # of tests that ended, which still need their verdict
        self._marks = 0  # that came on stderr
        self._said: dict[Stream, Kept] = {"stdout": Kept(), "stderr": Kept()}
        self._tries: dict[str, Try] = {}
        self._doing: Callable[[], None] = lambda: None
        self._now = Doing(0)
        self._limit_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._killing: asyncio.Task[None] | None = None
        self._done = False  # all tests of the batch were told of
        self._batch_done = asyncio.Event()
        self._process: TestProcess | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._streams: dict[Stream, Splitter] = {
            "stdout": Splitter(token, lambda data: self._said["stdout"].add(data), self._event),
            "stderr": Splitter(token, lambda data: self._said["stderr"].add(data), self._mark),
        }

    async def start(self, place: Place, words: Sequence[str]) -> None:
        self._process = await place.start(words, lambda stream, data: self._streams[stream].feed(data))
        self._waiting = asyncio.create_task(self._wait(self._process))

    async def _wait(self, process: TestProcess) -> None:
        how = await process.wait()
        for stream in self._streams.values():
            stream.end()
        while self._verdicts:  # a test closed stderr
            self._verdicts.popleft()("")
        self._stop_timer()
        self.ended = how
        self._batch_done.set()

    async def batch(
        self, ids: Sequence[str], limit_s: float, tries: dict[str, Try], doing: Callable[[], None], now: Doing
    ) -> None:
        """Run until each test has a try, or the process has ended."""
        self._tries, self._limit_s, self._doing, self._now = tries, limit_s, doing, now
        if self._process is None or self.ended is not None:
            return
        self._done = False
        self._batch_done.clear()
        if not self._ready:
            self._start_timer(max(limit_s, COLLECT_LIMIT_S) if limit_s else 0.0)
        await self._process.send(json.dumps({"run": list(ids)}).encode() + b"\n")
        await self._batch_done.wait()
        if self._waiting is not None and (self._killing is not None or self.ended is not None):
            await self._waiting

    async def kill(self) -> None:
        if self._process is not None and self._waiting is not None:
            await self._process.kill()
            await self._waiting

    async def end_session(self, limit_s: float | None) -> str:
        """End session fixtures and keep the process; return what failed, or an empty string."""
        if self._process is None or self._waiting is None:
            return ""
        self._closed.clear()
        await self._process.send(b'{"end": true}\n')
        closed = asyncio.create_task(self._closed.wait())
        try:
            await asyncio.wait([closed, self._waiting], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        if self._closed.is_set():
            return self._fault
        if self.ended is not None:
            return f"they ended its process: {self.ended}"
        await self.kill()
        return f"they had not ended after {limit_s:g} s"

    async def close(self) -> str:
        if self._process is None or self._waiting is None:
            return ""
        self._process.close_input()
        await asyncio.wait([self._waiting], timeout=CLOSE_S)
        if not self._waiting.done():
            await self.kill()
            return f"they had not ended after {CLOSE_S:g} s"
        return self._fault

    # ---- what it says

    def _mark(self, _: bytes) -> None:
        """Handle the mark of a test's start or end on stderr."""
        self._marks += 1
        if self._marks % 2 == 0:
            self._stderr.append(self._said["stderr"].text())
            self._conclude()
        self._said["stderr"] = Kept()

    def _event(self, data: bytes) -> None:
        try:
            event: Any = json.loads(data)
        except ValueError:
            return
        if "start" in event:
            self._id, self._file = str(event["start"]), ""
            self._started, self._began = float(event["at"]), time.monotonic()
            self._said["stdout"] = Kept()
            self._now.id, self._now.began = self._id, self._began
            self._start_timer(self._limit_s)
            self._doing()
        elif "end" in event:
            self._stop_timer()
            if not self._hung and event["end"] == self._id:
                fields = event | {"started": self._started, "stdout": self._said["stdout"].text()}
                self._verdicts.append(lambda stderr: self._tell(event["end"], fields | {"stderr": stderr}))
                self._id = ""
                self._conclude()
        elif "collecting" in event:
            self._file = str(event["collecting"])
            self._start_timer(max(self._limit_s, COLLECT_LIMIT_S) if self._limit_s else 0.0)
        elif "ready" in event:
            self._ready, self._pid = True, int(event["pid"])
        elif "done" in event:
            self._file, self._done = "", True
            self._conclude()
        elif "stopped" in event:
            self._stopped = str(event["stopped"])
            self._start_timer(CLOSE_S)
        elif "closed" in event:
            self._fault, self.fault_details = str(event["closed"]), str(event.get("details", ""))
            self._closed.set()

    def _conclude(self) -> None:
        while self._verdicts and self._stderr:
            self._verdicts.popleft()(self._stderr.popleft())
        if self._done and not self._verdicts:
            self._batch_done.set()

    def _tell(self, of: str, fields: dict[str, Any]) -> None:
        known = {name: value for name, value in fields.items() if name in Try.model_fields}
        try:
            made = Try.model_validate(known | {"process": self.name})
        except ValidationError as error:
            made = self.failed(f"its process told what is no outcome: {error.errors()[0]['msg']}")
        self._tries[of] = made
        self._now.done, self._now.id = self._now.done + 1, self._id
        self._doing()

    # ---- limits

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        if seconds:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        if self._killing is None and self._process is not None:
            self._hung = True
            self._killing = asyncio.create_task(self._end_hanging(self._process))

    async def _end_hanging(self, process: TestProcess) -> None:
        """Ask the process where it is, then kill it."""
        if self._pid:
            await process.show_stacks(self._pid)
            until = time.monotonic() + STACKS_WAIT_S
            while self.ended is None and time.monotonic() < until and not _stacks(self._said["stderr"].text()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.05)
        await process.kill()

    # ---- its end

    def blame(self, ids: Sequence[str], tries: dict[str, Try]) -> None:
        """Add a try for the test that ended the process in the middle of a batch."""
        self._tries = tries
        if not self._ready:
            said = f"{self._said['stdout'].text()}\n{self._said['stderr'].text()}".strip()[-OUTPUT_MAX:]
            why = "it did not start in time" if self._hung else self.ended
            for one in ids:
                tries[one] = self.failed(f"pytest could not be started: {why}", said)
        elif self._id:
            self._tell(self._id, self._death("call", time.monotonic() - self._began))
        elif self._file:
            for one in ids:
                if one not in tries and one.partition("::")[0] == self._file:
                    self._tell(one, self._death("collect", 0.0))

    def _death(self, phase: str, seconds: float) -> dict[str, Any]:
        stderr = self._said["stderr"].text()
        stacks = _stacks(stderr)
        what = "collecting its file" if phase == "collect" else "it"
        if self._hung and not self._stopped:
            limit = max(self._limit_s, COLLECT_LIMIT_S) if phase == "collect" else self._limit_s
            outcome, message = Outcome.TIMEOUT, f"{what} took more than {limit:g} s, and its process was ended"
        elif self.ended == f"exit code {LOST}":
            outcome, message = Outcome.CRASHED, CLOSED
        else:
            outcome, message = Outcome.CRASHED, f"{what} ended its process: {self._stopped or self.ended}"
        return {
            "outcome": outcome,
            "phase": phase,
            "seconds": seconds,
            "started": self._started if phase == "call" else time.time(),
            "message": message,
            "details": _OF_PYTEST.sub("", stacks),
            "stdout": self._said["stdout"].text(),
            "stderr": stderr.removesuffix(stacks),
        }

    def failed(self, message: str, details: str = "") -> Try:
        return Try(
            outcome=Outcome.ERROR,
            phase="setup",
            started=time.time(),
            process=self.name,
            message=message,
            details=details,
        )


def _stacks(stderr: str) -> str:
    """Return the threads' stacks that faulthandler printed."""
    found = _STACKS.search(stderr)
    return found[0] if found is not None else ""
