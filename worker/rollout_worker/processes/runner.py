"""Child process of the worker: one executor, its attempts, and a socket to the daemon.

`runner.py FD PARENT_PID [BYTES]`; BYTES is its memory limit if no control group enforces one.

The daemon keeps the connection to the coordinator. Whatever user code does here (block the interpreter, leak, crash)
costs this process and its attempts, never the worker.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import structlog
from rollout.config.logging import JSON, configure, hide, redact_text
from rollout.model.errors import AttemptError, RolloutError
from rollout.model.item import Blob, Failure, Key, ObjectSlice, Outcome, hosted
from rollout.objects.cache import read_cached
from rollout.processes.lifeline import die_with_parent
from rollout.processes.pipe import Pipe
from rollout.wire.codec import ID_BYTES, INT_MAX, UNITS_MAX, spec_columns_from_wire, split_ids, unpack_blobs
from rollout.wire.v1 import common_pb2, work_pb2

from rollout_worker.attempts import OUT_OF_MEMORY, Finished, group_to_wire, run_from_wire
from rollout_worker.executors.port import Attempt, Done, Executor, LostError, Run, UnsuitableError, remember
from rollout_worker.processes.context import AttemptContext, Requests, hindrance
from rollout_worker.processes.kinds import Kind

log = structlog.get_logger()

CANCELLED = Failure("cancelled", "cancelled", True)
NOTHING = Done(b"")
GATHER_S = 0.03
"""Seconds for which results are gathered: a frame for each result of a millisecond would cost as much as the work."""
GROUP = "rollout.executors"


def executor_class(name: str) -> type[Executor]:
    """Return the executor registered under that name. Raises AttemptError if none is installed."""
    found = entry_points(group=GROUP)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise AttemptError(
            f"this worker has no executor {name!r} (installed: {known}); install the package that provides it, "
            f"through the entry point group {GROUP}",
            code="executor_missing",
            retry=False,
        )
    return found[name].load()


class Runner:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._pipe = Pipe(self._frame, self._lost)
        self._requests = Requests(self._pipe.send)
        self._executor_name = ""
        self._executor: Executor | None = None
        self._run_many: Callable[[list[Attempt]], list[Done | None]] | None = None
        self._scratch = Path()
        self._cache = Path()
        self._width = 1
        self._ahead = 0
        self._take_unbegun: Callable[[list[Key]], list[Key]] | None = None
        self._gathers = False  # results of short attempts, while there are more
        self._waiting = 0
        self._leaving: set[Key] = set()  # begun before their turn and asked back
        self._runs: dict[str, Run] = {}
        self._pending: deque[Attempt] = deque()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._contexts: dict[Key, AttemptContext] = {}
        self._ahead_of_turn: deque[Key] = deque()  # with the executor already, behind `width` others
        self._began: dict[Key, float] = {}  # since when it has been its turn
        self._finished: list[Finished] = []
        self._flush_due = False
        self._children_tail: asyncio.Task[None] | None = None
        self._init: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._stop = asyncio.Event()

    async def main(self) -> int:
        await self._pipe.over(socket.socket(fileno=self._fd))
        init = await self._init
        run = Run(**init["run"])
        self._executor_name = run.executor
        self._runs[run.run_id] = run
        for name in init["secrets"]:
            hide(os.environ[name])
        self._scratch = Path(init["scratch"])
        self._cache = Path(init["cache"])
        context = AttemptContext(self._requests, self._scratch / "start", None, lambda _: None)
        try:
            self._executor = executor_class(hosted(run.executor))()
            await self._executor.start(run, context)
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is reported, typed
            failure = start_failure(error)
            body = {"code": failure.code, "message": failure.message, "retryable": failure.retryable}
            self._pipe.send(Kind.FAILED, json.dumps(body).encode())
            await self._stop.wait()
            return 1
        self._width = max(1, self._executor.concurrency)
        self._ahead = max(0, int(getattr(self._executor, "ahead", 0)))
        self._take_unbegun = getattr(self._executor, "take_back", None)
        self._run_many = getattr(self._executor, "run_many", None)
        gc.collect()
        gc.freeze()
        # What a slot takes ahead it takes from what it was given: long rows must not wait here while others are free.
        ahead = self._ahead if self._executor.placement != "slot" else 0
        self._gathers = self._ahead > ahead
        self._pipe.send(Kind.READY, json.dumps({"width": self._width, "ahead": ahead}).encode())
        await self._stop.wait()
        for task in list(self._tasks.values()):
            task.cancel()
        await self._executor.close()
        self._flush()
        return 0

    def _lost(self) -> None:
        # The daemon is gone, and with it everything that was to be told: end the whole group, now.
        os.killpg(0, signal.SIGKILL)

    # ---- frames

    def _frame(self, kind: int, body: bytes) -> None:
        if kind == Kind.ASSIGN:
            self._assign(work_pb2.AssignGroup.FromString(body))
        elif kind == Kind.CANCEL:
            self._cancel(common_pb2.AttemptKeys.FromString(body))
        elif kind == Kind.RECALL:
            self._give_back(common_pb2.AttemptKeys.FromString(body))
        elif kind == Kind.LEAVE:
            leave: Any = getattr(self._executor, "leave", None)
            if leave is not None:
                leave(float(json.loads(body)["budget_s"]))
        elif kind == Kind.HOLD:
            hold: Any = getattr(self._executor, "hold", None)
            if hold is not None:
                hold(bool(json.loads(body)["on"]))
        elif kind == Kind.RELAY:
            self._relayed(work_pb2.WorkDown.FromString(body))
        elif kind == Kind.RESUME:
            message = work_pb2.Resume.FromString(body)
            self._in_order(self._resume(Key(message.log, message.seq)))
        elif kind == Kind.CHILDREN:
            self._in_order(self._children(work_pb2.ChildResults.FromString(body)))
        elif kind == Kind.REPLY:
            self._requests.answered(body)
        elif kind == Kind.INIT:
            self._init.set_result(json.loads(body))
        elif kind == Kind.STOP:
            self._stop.set()

    def _in_order(self, work: Any) -> None:
        """Handle frames in order: results of children may have to be fetched, and a Resume after them waits for
        that."""
        before = self._children_tail

        async def step() -> None:
            if before is not None:
                await asyncio.wait([before])
            await work

        self._children_tail = self._loop.create_task(step())

    def _relayed(self, frame: work_pb2.WorkDown) -> None:
        replica = frame.heard.replica if frame.HasField("heard") else frame.hung_up.replica
        context = self._contexts.get(Key(replica.log, replica.seq))
        if context is not None and context.number == replica.attempt:
            context.relayed(frame)

    async def _resume(self, key: Key) -> None:
        context = self._contexts.get(key)
        if context is not None:
            context.resumed()

    async def _children(self, message: work_pb2.ChildResults) -> None:
        key = Key(message.parent_log, message.parent_seq)
        context = self._contexts.get(key)
        if context is None:
            return
        try:
            await context.take_children(message)
        except RolloutError as error:
            task = self._tasks.get(key)
            if task is not None:
                sys.stderr.write(f"results of children cannot be read: {error}\n")
                task.cancel()

    def _assign(self, group: work_pb2.AssignGroup) -> None:
        run = self._runs.get(group.run.run_id)
        if run is None:
            # Its configuration is what this executor is told of it already.
            run = replace(run_from_wire(group.run), executor=self._executor_name)
            remember(self._runs, run.run_id, run)
        ids = split_ids(group.ids)
        payloads = unpack_blobs(group.length, group.data, group.refs)
        if group.refs:
            with suppress(OSError):  # each attempt asks for its own, and fails by what it is told
                payloads = read_cached(self._cache, payloads)
        specs, index = spec_columns_from_wire(group.specs, group.spec_index, len(ids))
        parent = Key(group.parent_log, group.parent_seq) if group.parent_log else None
        log = group.log
        attempts = [
            Attempt(Key(log, seq), number, id, payload, specs[0] if index is None else specs[index[i]], run, parent)  # type: ignore[arg-type]
            for i, (seq, number, id, payload) in enumerate(zip(group.seq, group.attempt, ids, payloads, strict=True))
        ]
        for before in group.predecessors:
            attempts[before.index].predecessor = before.data
        for i in group.isolate:
            attempts[i].isolate = True
        for i, failures in group.failures.items():
            attempts[i].failures = failures
        for i, losses in group.losses.items():
            attempts[i].losses = losses
        for i, data in group.handoff.items():
            attempts[i].handoff = data
        if self._run_many is not None:
            attempts = self._fast(attempts)
        self._pending.extend(attempts)
        self._pump()

    def _fast(self, attempts: list[Attempt]) -> list[Attempt]:
        """Run what the executor does synchronously, all at once; return the rest."""
        assert self._run_many is not None
        rest: list[Attempt] = []
        ended = iter(self._run_many([a for a in attempts if _unread(a) is None]))
        for attempt in attempts:
            done = next(ended, None) if _unread(attempt) is None else None
            if done is None:
                rest.append(attempt)
            else:
                self._report(attempt, done, 0)
        return rest

    # ---- attempts

    def _pump(self) -> None:
        while self._pending and len(self._tasks) - self._waiting < self._width + self._ahead:
            attempt = self._pending.popleft()
            scratch = self._scratch / f"{attempt.key.log}-{attempt.key.seq}-{attempt.attempt}"
            context = AttemptContext(self._requests, scratch, attempt, self._waits)
            self._contexts[attempt.key] = context
            task = self._tasks[attempt.key] = self._loop.create_task(self._attempt(attempt, context))
            task.add_done_callback(partial(self._ended, attempt))
            self._ahead_of_turn.append(attempt.key)
        self._take_turns()

    def _take_turns(self) -> None:
        """Start attempts in turn: those that the executor takes ahead wait, which is not part of their own time."""
        while self._ahead_of_turn and len(self._began) - self._waiting < self._width:
            key = self._ahead_of_turn.popleft()
            if key in self._tasks and key not in self._began:
                self._began[key] = time.monotonic()

    def _waits(self, change: int) -> None:
        self._waiting += change
        self._pump()

    async def _attempt(self, attempt: Attempt, context: AttemptContext) -> None:
        assert self._executor is not None
        started = time.monotonic()
        left = NOTHING
        try:
            if (unread := _unread(attempt)) is not None:
                attempt.payload = await context.get_object(unread)
            done: Done | Failure | None = await self._executor.run(attempt, context)
            if not isinstance(done, Done) or not isinstance(done.data, bytes):  # type: ignore[redundant-expr]
                done = Failure("executor_error", f"the executor returned {type(done).__name__}, not Done with bytes")
        except asyncio.CancelledError:
            done = CANCELLED
        except UnsuitableError as error:
            self._pipe.send(Kind.HINDERED, hindrance(attempt, failure_of(error), returned=True))
            done = None  # that is all that is said of it
        except AttemptError as error:
            done, left = failure_of(error), evidence_of(error)
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises fails its attempt, typed
            done = failure_of(error)
        try:
            await context.close()
        except Exception as error:  # noqa: BLE001 - of the same user code: it must not cost the result
            log.warning("attempt_not_cleaned_up", seq=attempt.key.seq, error=f"{type(error).__name__}: {error}")
        del self._tasks[attempt.key]
        del self._contexts[attempt.key]
        started = self._began.pop(attempt.key, started)  # it may be over before its turn
        if done is CANCELLED and attempt.key in self._leaving:
            done = None  # whoever takes it back tells of it
        else:
            self._leaving.discard(attempt.key)
        if done is not None:
            self._report(attempt, done, round((time.monotonic() - started) * 1000), left)
        self._pump()

    def _ended(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        """Handle the end of a task; one that is cancelled before its first step runs none of its code."""
        if self._tasks.get(attempt.key) is not task:
            return
        del self._tasks[attempt.key]
        del self._contexts[attempt.key]
        self._began.pop(attempt.key, None)
        if attempt.key not in self._leaving:
            self._report(attempt, CANCELLED, 0)
        self._pump()

    def _cancel(self, keys: common_pb2.AttemptKeys) -> None:
        for seq, number in zip(keys.seq, keys.attempt, strict=True):
            key = Key(keys.log, seq)
            task = self._tasks.get(key)
            if task is not None:
                task.cancel()
                continue
            for attempt in self._pending:
                if attempt.key == key and attempt.attempt == number:
                    self._pending.remove(attempt)
                    self._report(attempt, CANCELLED, 0)
                    break

    def _give_back(self, asked: common_pb2.AttemptKeys) -> None:
        """Give back attempts that wait here behind others; those whose turn it is stay."""
        keys = set(zip(asked.seq, asked.attempt, strict=True))
        returned = common_pb2.AttemptKeys(log=asked.log)
        kept: deque[Attempt] = deque()
        for attempt in self._pending:
            if attempt.key.log == asked.log and (attempt.key.seq, attempt.attempt) in keys:
                returned.seq.append(attempt.key.seq)
                returned.attempt.append(attempt.attempt)
            else:
                kept.append(attempt)
        self._pending = kept
        early = list(self._tasks)[self._width + self._waiting :] if self._ahead else []
        early = [k for k in early if k.log == asked.log and (k.seq, self._contexts[k].number) in keys]
        if early and self._take_unbegun is not None:
            early = self._take_unbegun(early)
        if early:
            self._in_order(self._take_back(early, returned))
        else:
            self._pipe.send(Kind.RETURNED, returned.SerializeToString())

    async def _take_back(self, early: list[Key], returned: common_pb2.AttemptKeys) -> None:
        tasks = {key: (self._tasks[key], self._contexts[key].number) for key in early if key in self._tasks}
        self._leaving.update(tasks)
        for task, _ in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait([task for task, _ in tasks.values()])
        for key, (_, number) in tasks.items():
            if key in self._leaving:  # not over before it could be cancelled
                self._leaving.discard(key)
                returned.seq.append(key.seq)
                returned.attempt.append(number)
        self._pipe.send(Kind.RETURNED, returned.SerializeToString())

    def _report(self, attempt: Attempt, done: Done | Failure, duration_ms: int, left: Done = NOTHING) -> None:
        """Report a result or a failure; `left` is the evidence of a failed attempt."""
        log, seq = attempt.key
        if isinstance(done, Done):
            if done.seconds is not None:
                duration_ms = round(done.seconds * 1000)
            result = Finished(
                log, seq, attempt.attempt, "", done.data, int(done.outcome), None, duration_ms, done.units_in,
                done.units_out, done.keeps,
            )  # fmt: skip
        else:
            result = Finished(
                log, seq, attempt.attempt, "", left.data, int(Outcome.FAILED), done, duration_ms, left.units_in,
                left.units_out, left.keeps,
            )  # fmt: skip
        self._finished.append(result)
        if not self._flush_due:
            self._flush_due = True
            if self._gathers and self._tasks:
                self._loop.call_later(GATHER_S, self._flush)
            else:
                self._loop.call_soon(self._flush)
        elif self._gathers and not self._tasks:
            self._loop.call_soon(self._flush)  # nothing more to gather: the worker has the next

    def _flush(self) -> None:
        self._flush_due = False
        finished, self._finished = self._finished, []
        by_log: dict[int, list[Finished]] = {}
        for one in finished:
            by_log.setdefault(one.log, []).append(one)
        for log, members in by_log.items():
            self._pipe.send(Kind.RESULTS, group_to_wire(log, members).SerializeToString())


def _unread(attempt: Attempt) -> ObjectSlice | None:
    """Return the input if it was evicted from the cache before it was read; an executor gets bytes only."""
    payload = cast(Blob, attempt.payload)
    return payload if isinstance(payload, ObjectSlice) else None


def failure_of(error: Exception) -> Failure:
    """Return the failure, which reaches the ledger and clients and therefore quotes no secret."""
    if isinstance(error, MemoryError):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        text = f"{limit >> 20} MiB, " if limit != resource.RLIM_INFINITY else ""
        return Failure(OUT_OF_MEMORY, redact_text(f"an allocation failed ({text}MemoryError: {error})")[:2000], True)
    if isinstance(error, AttemptError):
        message, wrong = redact_text(error.message), _malformed(error)
        if wrong:
            message = f"{message}; the executor left evidence of it that is none: {', '.join(wrong)}"
        delay = None if "retry_after_ms" in wrong else error.retry_after_ms
        return Failure(error.error_code, message, error.retry, isinstance(error, LostError), delay)
    if isinstance(error, RolloutError):
        return Failure(error.code, redact_text(error.message), True)
    return Failure("executor_error", redact_text(f"{type(error).__name__}: {error}")[:2000], True)


def evidence_of(error: AttemptError) -> Done:
    """Return what stays with a failed attempt; `failure_of` reports what is left out, because user code set it."""
    if _malformed(error):
        return NOTHING
    return Done(error.data, error.units_in, error.units_out, Outcome.FAILED, error.keeps)


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == ID_BYTES


def _malformed(error: AttemptError) -> list[str]:
    def is_count(value: Any, most: int) -> bool:
        return isinstance(value, int) and 0 <= value <= most

    fine = {
        "data": isinstance(cast(Any, error.data), bytes),
        "keeps": isinstance(cast(Any, error.keeps), tuple) and all(map(_is_id, error.keeps)),
        "units_in": is_count(error.units_in, UNITS_MAX),
        "units_out": is_count(error.units_out, UNITS_MAX),
        "retry_after_ms": error.retry_after_ms is None or is_count(error.retry_after_ms, INT_MAX),
    }
    return [name for name, is_fine in fine.items() if not is_fine]


_LASTING = (
    ImportError,
    SyntaxError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    NameError,
    NotImplementedError,
)


def start_failure(error: Exception) -> Failure:
    """Return why an executor does not start. What a retry cannot change is not retried."""
    failure = failure_of(error)
    if isinstance(error, AttemptError) or failure.code == OUT_OF_MEMORY:
        return failure
    lasting = not error.retryable if isinstance(error, RolloutError) else isinstance(error, _LASTING)
    return Failure(failure.code, failure.message, not lasting)


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    for size in map(int, sys.argv[3:]):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)  # nobody may raise it
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    # The terminal's Ctrl-C and the service manager's SIGTERM are the daemon's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure(JSON, stream=sys.stderr)

    async def run() -> int:
        return await Runner(fd).main()

    code = asyncio.run(run())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that an engine left behind must not keep the process


if __name__ == "__main__":
    main()
