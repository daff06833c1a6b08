"""Executor of the `map` workload: passes rows to the user's function and returns its results.

The function runs in its own process (map_process.py), which this executor starts, feeds and ends. A row that crashes,
hangs or exits therefore costs only itself and the start of another process, and the executor can say which row it was,
by which signal, where it hung and what it printed last. The worker daemon is not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from blake3 import blake3
from rollout.compute import cgroup
from rollout.config.logging import redact_text
from rollout.model.errors import AttemptError
from rollout.model.item import Key
from rollout.processes.backoff import Backoff
from rollout.processes.child import Child
from rollout.processes.descendants import kill_with_descendants
from rollout.processes.exits import exit_text
from rollout.processes.pipe import Pipe, Printed, inherited_socket
from rollout.workloads.invalid import refuse_invalid
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.map.failure import to_text
from rollout.workloads.map.limits import try_limit_s

from rollout_worker.bounded_lines import LINE_MAX, BoundedLines
from rollout_worker.executors import map_loop
from rollout_worker.executors import map_process as process
from rollout_worker.executors.port import Attempt, Context, Done, LostError, Run
from rollout_worker.executors.trees import shared_tree
from rollout_worker.left_out import MARK, marks

AHEAD = 64
WINDOW_S = 0.02
"""Seconds of work in the process's queue, so that it never waits for a row. Rows that it has not begun can be taken
back."""
REST_S = 0.005
"""Seconds between reads of results while the queue holds more than that; one event-loop turn per result would dominate
the cost."""
INLINE_ROW = 16 << 10
"""Bytes above which a row travels in a file, because a datagram must fit the socket's buffer."""
FRAME_MAX = 128 << 20
STARTS_MAX = 3
"""Number of consecutive failed starts of a function that was loaded before, until a row fails for it."""
LOAD_FAILED = "load_failed"
CAUSE_MAX, FRAMES_MAX = 1200, 700
"""Maximum characters of why the function cannot be loaded, and of its frames; a worker reports 2,000 per cause."""
RESTART_PAUSE_S, RESTART_PAUSE_MAX_S = 0.5, 10.0
DUMP_WAIT_S = 1.0
HELD_S, CANCEL_WAIT_S = 4.0, 2.0
"""Seconds without an answer after which an event loop is ended: for a row over its time limit, and for a cancelled
one."""
DUMP_MAX = 64 << 10
CUT_OFF_S = 0.3
"""Seconds between the loss of a process's sockets and its end."""
DRAIN_S = 0.2
MESSAGE_MAX, TRACEBACK_MAX = 1200, 2600
"""Maximum characters, which with the type stay below the limit of an error on the wire, 4096."""
OUTPUT_BURST, OUTPUT_PER_S = 256 << 10, 16 << 10


Frames = Callable[[int, bytes], None]
Ended = Callable[["UserProcess", int, str], None]
"""Function called with the process, its exit code as in subprocess, and its last output."""


class MapExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "slot"
    ahead = AHEAD

    def __init__(self) -> None:
        self._host: Host | None = None

    @property
    def concurrency(self) -> int:
        """Number of concurrent rows in a process."""
        return self._host.at_once if self._host is not None else 1

    @classmethod
    def engine_key(cls, run: Run) -> str:
        """Return a key that runs of one function in one code directory share, so that they share a process."""
        return blake3(canonical([run.config.get("code"), _called(run)])).hexdigest()[:32]

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return {}

    async def start(self, run: Run, context: Context) -> None:
        """Fetch the code and load the function. Raises AttemptError, which says why and where it cannot be loaded."""
        root, pycache = "", ""
        manifest = run.config.get("code", {}).get("manifest")
        if manifest:
            place = await shared_tree(bytes.fromhex(manifest), context)
            root, pycache = str(place), str(place.with_name("pycache"))
        self._host = Host(_called(run) | {"root": root, "pycache": pycache}, context.scratch)
        await self._host.start()

    async def run(self, attempt: Attempt, context: Context) -> Done:
        if self._host is None:
            raise AttemptError("the executor is not started", code="executor_not_started")
        refuse_invalid(attempt.payload)
        job = Job(attempt.key, attempt.attempt, attempt.payload, try_limit_s(attempt.spec))
        return await self._host.run(job)

    def take_back(self, keys: Iterable[Key]) -> list[Key]:
        """Take back and return those of `keys` that the function has not begun."""
        return self._host.take_back(keys) if self._host is not None else []

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()


def _called(run: Run) -> JsonObject:
    """Return what a process of `run` calls, the number of concurrent rows (0: what suits the function), and `most` rows
    in all (0: unlimited)."""
    config = run.config
    of_run = config.get("run", {})
    return {
        "target": config["function"],
        "arguments": config.get("arguments", {}),
        "at_once": int(of_run.get("concurrency_per_process", 0)),
        "most": int(of_run.get("max_rows_per_process", 0)),
    }


class Job:
    """A row in progress: it waits here, then in the process's queue, then runs."""

    __slots__ = ("attempt", "begun", "done", "key", "number", "over", "payload", "timed_out", "timeout_s", "timer")

    def __init__(self, key: Key, attempt: int, payload: bytes, timeout_s: float) -> None:
        self.key = key
        self.attempt = attempt
        self.payload = payload
        self.timeout_s = timeout_s
        self.number = 0
        self.begun = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.timed_out = False  # beside others: it is cancelled
        self.over: asyncio.Event | None = None  # set when the process has it no more, for whoever waits for that
        self.done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

    def left(self) -> None:
        """Record that the process no longer has the row."""
        self.begun = 0.0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.over is not None:
            self.over.set()

    def fail(self, error: AttemptError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


_MARK_LINE = re.compile(MARK + rb"\d{0,18}\n")
JOBS_KNOWN = 1024
"""Number of rows whose output may still come; far more than the process is given ahead."""


class Output(BoundedLines):
    """Output of the function: forwarded to the worker's log as far as it is meant for people; its end is kept."""

    def __init__(self, file: int) -> None:
        super().__init__(
            time.monotonic(),
            bytes_a_second=OUTPUT_PER_S,
            lines_a_second=OUTPUT_PER_S,  # a line has a byte at least
            burst_s=OUTPUT_BURST / OUTPUT_PER_S,
            again=0.25,  # one note, not one for every few lines
            line_max=2 * LINE_MAX,  # the worker cuts it
        )
        self._file = file
        self._jobs: dict[int, Job] = {}
        self._name: bytes | None = None  # whose line came last
        self._unwritten = bytearray()

    def expect(self, job: Job) -> None:
        """Expect output of a row from now on."""
        self._jobs[job.number] = job
        self._jobs.pop(job.number - JOBS_KNOWN, None)

    def named(self, name: bytes) -> bytes:
        """Return the row's name that the daemon knows."""
        job = self._jobs.get(int(name)) if name.isdigit() else None
        return b"%d.%d.%d" % (job.key.log, job.key.seq, job.attempt) if job is not None else b""

    def take(self, stream: str, data: bytes) -> None:
        super().take(stream, data)
        self._write()

    def shown(self, stream: str, text: str, name: bytes) -> None:
        if self.untold:
            super().tell()
        if name != self._name:
            self._unwritten += MARK + name + b"\n"
            self._name = name
        self._unwritten += text.encode() + b"\n"

    def dropped(self, taken: list[tuple[int, int, int]]) -> None:
        self._unwritten += marks(taken)

    def tell(self) -> None:
        super().tell()
        self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._file, self._unwritten)
        self._unwritten.clear()

    def text(self) -> str:
        """Return the last output."""
        return _MARK_LINE.sub(b"", self.last_words).decode("utf-8", "replace").strip()


class Host:
    """Keeps one process that runs the function, and the rows it was given, of which the first `at_once` run."""

    def __init__(self, init: JsonObject, scratch: Path) -> None:
        """Start processes with `init`: what to call, and where its code is."""
        self.at_once = 1  # known once the function was loaded
        self._init = init
        self._root: str = init["root"]
        self._scratch = scratch
        self._process: UserProcess | None = None
        self._waiting: deque[Job] = deque()
        self._sent: dict[int, Job] = {}  # by number, in order
        self._taken: set[Job] = set()  # back, and not yet cancelled
        self._number = 0
        self._mean_s = WINDOW_S
        self._backoff = Backoff(RESTART_PAUSE_S, RESTART_PAUSE_MAX_S)
        self._pause_s = 0.0
        self._starting: asyncio.Task[None] | None = None
        self._hangs: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Load the function. Raises AttemptError if that fails."""
        failure = await self._launch()
        if failure is not None:
            raise unloadable(self._init["target"], failure)

    async def run(self, job: Job) -> Done:
        self._waiting.append(job)
        self._pump()
        try:
            return await job.done
        except asyncio.CancelledError:
            if not self._take_out(job) and job.begun and self._process is not None:
                await self._cancel(job, self._process)
            raise

    async def _cancel(self, job: Job, process: UserProcess) -> None:
        """Cancel a row and wait until it no longer runs."""
        if self.at_once > 1 and await self._cancel_beside(job, process, CANCEL_WAIT_S):
            return
        process.ended_for = job
        await process.end_now()

    def take_back(self, keys: Iterable[Key]) -> list[Key]:
        """Take back rows. They are cancelled a moment later; until then no result may send them to the process
        again."""
        self._recall()
        waiting = {job.key: job for job in self._waiting}
        taken = {key: waiting[key] for key in keys if key in waiting}
        self._taken.update(taken.values())
        self._waiting = deque(job for job in self._waiting if job.key not in taken)
        self._pump()
        return list(taken)

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            await self._process.end()

    # ---- rows to the process

    def _running(self) -> list[Job]:
        return list(islice(self._sent.values(), self.at_once))

    def _pump(self) -> None:
        if not self._waiting or self._closed or self._hangs is not None:
            return
        if self._process is None or not self._process.loaded:
            self._need_process()
            return
        left = self._left(self._process)
        running, width = self._running(), self.at_once
        late = running and time.monotonic() - max(job.begun for job in running) > WINDOW_S
        window = width + (0 if late else min(AHEAD, int(width * WINDOW_S / max(self._mean_s, 1e-6))))
        while self._waiting and len(self._sent) < window and left > 0:
            job = self._waiting[0]
            self._number += 1
            job.number = self._number
            if not self._process.give(job):
                return  # its queue is full; the next result goes on
            left -= 1
            self._process.given += 1
            self._waiting.popleft()
            self._sent[job.number] = job
            if len(self._sent) <= width:
                self._begin(job)

    def _left(self, running: UserProcess) -> int:
        """Return the number of rows that the process may still be given."""
        most: int = self._init["most"]
        return most - running.given if most else sys.maxsize

    async def _renew(self, worn: UserProcess) -> None:
        """Replace a process that has run its maximum of rows; the next one starts when there is a row for it."""
        worn.loaded = False
        await worn.end()
        if self._process is worn:
            self._process = None
            self._pump()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _rest(self) -> float:
        """Return how long the results may wait to be read."""
        lasts = len(self._sent) * self._mean_s / self.at_once
        return REST_S if lasts > 2 * REST_S and self._mean_s < REST_S * self.at_once else 0.0

    def _begin(self, job: Job) -> None:
        job.begun = time.monotonic()
        if job.timeout_s:
            job.timer = asyncio.get_running_loop().call_later(job.timeout_s, self._timed_out, job)

    def _recall(self) -> None:
        """Take back, in order, what the process has not begun."""
        if self._process is None or len(self._sent) <= self.at_once:
            return
        unread = self._process.take_back()
        back = [self._sent.pop(number) for number in list(self._sent) if number in unread]
        self._process.given -= len(back)
        for job in back:
            job.left()
        self._waiting.extendleft(reversed(back))
        for job in self._running():  # the process may have read a row from behind those that were taken back meanwhile
            if not job.begun:
                self._begin(job)

    def _take_out(self, job: Job) -> bool:
        if job in self._taken:
            self._taken.discard(job)
            return True
        if job not in self._waiting:
            self._recall()
        if job in self._waiting:
            self._waiting.remove(job)
            self._pump()
            return True
        return False

    # ---- results

    def _result(self, kind: int, body: bytes) -> None:
        if len(body) < process.NUMBER.size:
            return
        number, seconds = process.NUMBER.unpack_from(body)
        body = body[process.NUMBER.size :]
        if kind in (process.LOADED, process.LOAD_FAILED):
            assert self._process is not None
            said = json.loads(body)
            if kind == process.LOADED:
                self.at_once = int(said["at_once"])
            self._process.said_loaded(None if kind == process.LOADED else said)
            return
        job = self._sent.get(number)
        if job is None or not job.begun or self._hangs is not None:
            return  # what ends while it is asked where it hangs has timed out all the same
        failure = None
        if kind == process.CANCELLED:
            failure = timed_out(job, frames_of(str(json.loads(body)["where"]), self._root))
        elif kind != process.RESULT:
            failure = error_of(json.loads(body))
        del self._sent[number]
        job.left()
        self._mean_s += 0.1 * (seconds - self._mean_s)
        if failure is not None:
            job.fail(failure)
        elif not job.done.done():
            job.done.set_result(Done(body, seconds=seconds))
        following = next(islice(self._sent.values(), self.at_once - 1, None), None)
        if following is not None and not following.begun:
            self._begin(following)
        if not self._sent and self._process is not None and self._left(self._process) <= 0 and not self._closed:
            self._do(self._renew(self._process))
        self._pump()

    # ---- the process

    def _need_process(self) -> None:
        if self._starting is None and self._process is None and not self._closed:
            self._starting = asyncio.get_running_loop().create_task(self._restart())

    async def _launch(self) -> JsonObject | None:
        """Start a process. Returns why the function cannot be loaded, or None once it is loaded."""
        started = self._process = UserProcess(self._init, self._scratch, self._result, self._ended, self._rest)
        failure = await started.start()
        if failure is not None:
            await started.end()
            self._process = None
        return failure

    async def _restart(self) -> None:
        """Restart a function that was loaded before; no row is to blame for the first failures, and each gets another
        attempt."""
        try:
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            failure = await self._launch()
            if failure is None:
                self._pause_s = 0.0
                self._backoff.reset()
                return
            self._pause_s = self._backoff.pause_s()
            if self._waiting and self._backoff.failures >= STARTS_MAX:
                self._waiting.popleft().fail(error_of(failure | {"retry": True}))
        finally:
            self._starting = None
            self._pump()

    def _ended(self, ended: UserProcess, code: int, said: str) -> None:
        """Handle the end of a loaded process. The next one gets what it had not begun."""
        self._process = None
        begun = [job for job in self._sent.values() if job.begun]
        behind = [job for job in self._sent.values() if not job.begun]
        self._sent.clear()
        for job in begun:
            job.left()
        if self.at_once > 1:
            self._end_together(ended, begun, code, said)
        elif begun and ended.ended_for not in (None, begun[0]):
            behind = begun + behind  # the row that was to be ended was over by then: the next is not to blame
        elif begun:
            begun[0].fail(self._why(ended, begun[0], code, said))
        self._waiting.extendleft(reversed(behind))
        self._hangs = None
        self._pump()

    def _end_together(self, ended: UserProcess, begun: list[Job], code: int, said: str) -> None:
        """Fail the row that is known to be the cause; those that ran beside it are lost."""
        number = ended.held_by or (0 if ended.ended_for is not None else ended.holder())
        cause = next((job for job in begun if job.number == number), None)
        if cause is None and len(begun) == 1 and ended.ended_for is None:
            cause = begun[0]
        for job in begun:
            if job is cause:
                job.fail(self._why(ended, job, code, said))
            else:
                job.fail(lost(code, said, of_row=cause is not None or ended.ended_for is not None))

    def _why(self, ended: UserProcess, job: Job, code: int, said: str) -> AttemptError:
        if ended.cut_off and ended.hung_at is None:
            return error_of(_failure("process_died", "ProcessDied", _CUT_OFF))
        if ended.hung_at is not None and ended.held_by and not job.timed_out:
            return error_of(_failure("timeout", "TimeoutError", _HELD, ended.hung_at))
        if ended.hung_at is not None:
            return timed_out(job, ended.hung_at)
        return error_of(death("the function ended its process", code, said, self._root, ended.ran_out))

    # ---- time limits

    def _timed_out(self, job: Job) -> None:
        job.timer = None
        if job.number not in self._sent or self._process is None or self._hangs is not None:
            return
        if self.at_once > 1:
            self._do(self._cut_short(job, self._process))
        else:
            self._hangs = asyncio.get_running_loop().create_task(self._process.end_hanging())

    async def _cut_short(self, job: Job, running: UserProcess) -> None:
        """Cancel a row beside others. If the event loop does not answer, the row that blocks it must end, and the
        process with it."""
        job.timed_out = True
        if await self._cancel_beside(job, running, DUMP_WAIT_S):
            return
        if running.holder() != job.number and await self._cancel_beside(job, running, HELD_S):
            return
        if self._hangs is None and self._process is running:
            running.held_by = running.holder() or job.number
            self._hangs = asyncio.get_running_loop().create_task(running.end_hanging())

    async def _cancel_beside(self, job: Job, running: UserProcess, wait_s: float) -> bool:
        """Cancel a row; return whether it ended within `wait_s` seconds."""
        job.over = job.over or asyncio.Event()
        running.cancel(job.number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(job.over.wait(), wait_s)
        return job.over.is_set()


class UserProcess:
    """One map_process.py: its queue of rows, its results, its output."""

    def __init__(
        self, init: JsonObject, scratch: Path, on_frame: Frames, on_end: Ended, rest: Callable[[], float]
    ) -> None:
        self.loaded = False
        self.given = 0  # rows
        self.hung_at: str | None = None
        self.held_by = 0  # number of the row that held the event loop, for which it was ended
        self.ended_for: Job | None = None  # it was ended because this row was cancelled
        self.cut_off = False  # it was ended because no results can come from it any more
        self.ran_out = False  # the kernel ended it, over the limit of this executor's control group
        self._oom_kills = cgroup.oom_kills()
        self._init = json.dumps(init).encode()
        self._root: str = init["root"]
        self._scratch = scratch
        self._rows, self._unread = _rows_pair()
        self._lost = asyncio.Event()
        self._results = _Results(on_frame, self._lost.set, rest)
        self._loading: asyncio.Future[JsonObject | None] = asyncio.get_running_loop().create_future()
        self._child: Child | None = None
        self._output = Output(1)
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - where Python says in which lines it crashed or hangs
        os.truncate(self._dump.fileno(), map_loop.NUMBER.size)
        os.lseek(self._dump.fileno(), map_loop.NUMBER.size, os.SEEK_SET)
        self._held_last = 0
        self._watch: asyncio.Task[None] | None = None
        self._cut: asyncio.Task[None] | None = None
        self._on_end = on_end
        self._exited = asyncio.Event()
        self._done = asyncio.Event()  # and all that it said has been read
        self._stopping = False

    async def start(self) -> JsonObject | None:
        """Start the process. Returns why the function cannot be loaded, or None once it is loaded."""
        read, write = os.pipe()
        try:
            with inherited_socket() as (ours, fd):
                ends = (self._unread.fileno(), fd, self._dump.fileno())
                command = [sys.executable, "-P", process.__file__, *map(str, ends), str(os.getpid())]
                self._child = await Child.start(command, pass_fds=ends, stdout=write, stderr=write)
        except OSError as error:
            os.close(read)
            self._dump.close()
            self._exited.set()
            self._done.set()
            return _failure("process_died", "OSError", f"no process can be started: {error}")
        finally:
            os.close(write)
        await self._results.over(ours)
        loop = asyncio.get_running_loop()
        printed = await Printed(partial(self._output.take, "stdout")).over(os.fdopen(read, "rb", 0))
        self._watch = loop.create_task(self._wait(self._child, printed))
        self._cut = loop.create_task(self._end_cut_off())
        self._rows.send(self._init)
        return await self._loading

    def said_loaded(self, failure: JsonObject | None) -> None:
        if not self._loading.done():
            self.loaded = failure is None
            self._loading.set_result(failure)

    async def _wait(self, child: Child, printed: Printed) -> None:
        code = await child.wait()
        self.ran_out = code == -signal.SIGKILL and cgroup.oom_kills() > self._oom_kills
        self._exited.set()
        self._results.resume()
        # What it said before it ended counts. A process that it left behind may hold its sockets open for ever.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), DRAIN_S)
        await asyncio.sleep(0)
        printed.close()
        self._results.abort()
        self._output.close()
        self._rows.close()
        self._unread.close()
        was_loaded, self.loaded = self.loaded, False
        self._done.set()
        said = f"{self._output.text()}\n{self._dumped()}".strip()
        self._held_last = self.holder()
        self._dump.close()
        if not self._loading.done():
            what = "the process ended while it loaded the function"
            self._loading.set_result(death(what, code, said, self._root, self.ran_out))
        elif was_loaded and not self._stopping:
            self._on_end(self, code, said)

    def holder(self) -> int:
        """Return the number of the row that blocks the event loop, or did last; 0 for none."""
        if self._dump.closed:
            return self._held_last
        return map_loop.NUMBER.unpack(os.pread(self._dump.fileno(), map_loop.NUMBER.size, 0))[0]

    def _dumped(self, begin: int = map_loop.NUMBER.size) -> str:
        """Return the dump from `begin` on, without seeking: the process shares the file position."""
        return os.pread(self._dump.fileno(), DUMP_MAX, begin).decode("utf-8", "replace")

    async def _end_cut_off(self) -> None:
        """End a process that continues without its end of the results: its row would wait forever."""
        await self._lost.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), CUT_OFF_S)
        if not self._exited.is_set():
            self.cut_off = True
            self.kill()

    # ---- rows

    def give(self, job: Job) -> bool:
        """Give the process a row. Returns False if its queue is full."""
        number, payload = job.number, job.payload
        self._output.expect(job)
        if len(payload) > INLINE_ROW:
            self._scratch.mkdir(parents=True, exist_ok=True)
            path = self._scratch / f"row-{number}"
            path.write_bytes(payload)
            message = process.ROW.pack(process.FILE, number) + str(path.absolute()).encode()
        else:
            message = process.ROW.pack(process.INLINE, number) + payload
        try:
            self._rows.send(message)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # it has just ended, which is told elsewhere
            return False
        return True

    def cancel(self, number: int) -> None:
        """Cancel a row of a process that runs several; it does nothing for a row that has ended."""
        self._results.send(map_loop.CANCEL, map_loop.NUMBER.pack(number))

    def take_back(self) -> set[int]:
        """Take back and return the rows that the process has not read."""
        found: set[int] = set()
        while True:
            try:
                message = self._unread.recv(1 << 20, socket.MSG_DONTWAIT)
            except OSError:
                return found
            if len(message) < process.ROW.size:
                return found
            found.add(process.ROW.unpack_from(message)[1])

    # ---- its end

    async def end_hanging(self) -> None:
        """Ask the process where it is, then kill it."""
        assert self._child is not None
        self.hung_at = ""
        begin = os.fstat(self._dump.fileno()).st_size
        self._child.signal_alone(signal.SIGUSR2)
        deadline = time.monotonic() + DUMP_WAIT_S
        while not (self._done.is_set() or "\n  File " in self._dumped(begin) or time.monotonic() > deadline):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.02)  # for the rest of it
        if not self._done.is_set():
            self.hung_at = frames_of(self._dumped(begin), self._root)
        self.kill()

    def kill(self) -> None:
        """Kill the process and everything it started."""
        if self._child is None or self._child.code is not None:
            return
        kill_with_descendants(self._child.pid, self._child.kill)

    async def end_now(self) -> None:
        """Kill the process and wait until it has ended."""
        self.kill()
        await self._exited.wait()

    async def end(self) -> None:
        self._stopping = True
        self.kill()
        await self._done.wait()


class _Results(Pipe):
    """Results of the user's process: anything that is no frame ends the reading, and so the process."""

    def __init__(self, on_frame: Frames, on_lost: Callable[[], None], rest: Callable[[], float]) -> None:
        super().__init__(self._checked, on_lost, FRAME_MAX)
        self._result = on_frame
        self._rest = rest

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if seconds := self._rest():
            self.pause(seconds)

    def _checked(self, kind: int, body: bytes) -> None:
        try:
            self._result(kind, body)
        except (ValueError, KeyError, TypeError):
            self.abort()


def _rows_pair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of datagram sockets: the process reads a row whole, or the executor takes it back whole."""
    kind = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    return ours, theirs


# ---- failures


def error_of(failure: JsonObject) -> AttemptError:
    message = process.shorten(redact_text(failure["message"]), MESSAGE_MAX)
    traceback = process.shorten(redact_text(failure["traceback"]), TRACEBACK_MAX)
    text = to_text(failure["type"], message, traceback)
    return AttemptError(text, code=failure["code"], retry=failure["retry"])


def unloadable(function: str, failure: JsonObject) -> AttemptError:
    """Return the error that says why this worker cannot start: one line, then the user's frames."""
    text = process.shorten(redact_text(f"{function} cannot be loaded: {failure['message']}"), CAUSE_MAX)
    lines = redact_text(failure["traceback"]).splitlines()
    # What stands before and after the frames is said already.
    frames = lines[1:-1] if lines and lines[0].startswith("Traceback") else lines[1:]
    if frames:
        text += "\n" + process.shorten("\n".join(frames), FRAMES_MAX)
    return AttemptError(text, code=LOAD_FAILED, retry=failure["retry"])


_CUT_OFF = (
    "the function closed or wrote to file descriptors that it did not open: its result cannot be had, and its process "
    "was ended"
)
_HELD = (
    "it held the event loop of its process for seconds while another row was over its time limit, and was ended: await "
    "what takes long, or run it with asyncio.to_thread"
)
_FATAL = "Fatal Python error: "


def timed_out(job: Job, hung_at: str) -> AttemptError:
    message = f"it was still running after {job.timeout_s:g} s, its time limit, and was ended"
    return error_of(_failure("timeout", "TimeoutError", message, hung_at))


def lost(code: int, said: str, *, of_row: bool) -> LostError:
    """Return the error of a row that ran beside others in a lost process. `of_row` says that another row is the
    cause."""
    what = "the process that ran it ended for another row" if of_row else "the process that ran it beside others ended"
    failure = death(what, code, said, "")
    return LostError(to_text(failure["type"], process.shorten(redact_text(failure["message"]), MESSAGE_MAX), ""),
                     code=failure["code"])  # fmt: skip


def death(what: str, code: int, said: str, root: str, ran_out: bool = False) -> JsonObject:
    """Describe a process's death. `said` is its last output, with the frames that Python writes when it crashes."""
    printed, fatal, dump = said.partition(_FATAL)
    message = f"{what}: {exit_text(code)}"
    if ran_out:
        message = f"{what}: it used more memory than a row may (--memory), and was killed"
    if printed.strip():
        message += f"; it printed last:\n{printed.strip()[-1000:]}"
    kind = ("out_of_memory", "MemoryError") if ran_out else ("process_died", "ProcessDied")
    return _failure(*kind, message, frames_of(dump, root) if fatal else "")


def _failure(code: str, kind: str, message: str, traceback: str = "") -> JsonObject:
    return {"code": code, "type": kind, "message": message, "traceback": traceback, "retry": True}


_NOT_USERS = re.compile(rf'"({re.escape(process.__file__)}|{re.escape(map_loop.__file__)}|[^"]*/asyncio/\w+\.py)"')


def frames_of(dump: str, root: str) -> str:
    """Return the user's frames in faulthandler's output, innermost first."""
    lines = [line for line in dump.splitlines() if line.startswith("  File ") and not _NOT_USERS.search(line)]
    text = "\n".join(lines)
    if root:
        text = text.replace(root + os.sep, "")
    return f"(most recent call first)\n{text[:2000]}" if text else ""
