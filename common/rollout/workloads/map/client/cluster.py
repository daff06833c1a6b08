"""`AsyncCluster`: functions over many rows on a cluster, for asyncio. `api` offers the same without asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from pydantic import ValidationError

from rollout.client.embedded import Embedded
from rollout.client.run_session import RunSession, unless
from rollout.client.runs import Page, Runs, new_ulid
from rollout.client.target import Target, need_target, owned
from rollout.config.cores import auto_count
from rollout.config.scratch import Scratch
from rollout.config.wording import describe
from rollout.model.errors import ConfigError, InvalidResultError, NotFoundError, RolloutError, StateError
from rollout.model.ids import check_ulid, is_ulid, means, short
from rollout.model.item import Outcome as ItemOutcome
from rollout.model.problems import problems
from rollout.workloads.code import Code, find_code
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid_result import as_failed
from rollout.workloads.json_form import parse_result
from rollout.workloads.map.call import Call
from rollout.workloads.map.client.feed import AsyncRows, Feed, RowsError
from rollout.workloads.map.client.function import Function, resolve
from rollout.workloads.map.config import RunSection
from rollout.workloads.map.failure import RowError
from rollout.workloads.map.lines import row_error
from rollout.workloads.map.plan import Planner, map_spec, run_config

WINDOW = 4096
"""Maximum number of rows of a `map` that are submitted and whose outcomes have not been read."""
_WINDOW_MIN = 1024  # two frames: what is submitted goes in frames, and one may be waiting to be filled
LEAVE_S = 30.0
"""How long leaving the cluster waits for an iterable without a length, which may be endless."""
_ENDED_WELL = "completed"
_OF_CALL = frozenset({"code", "args", "kwargs", "lanes"})
_log = logging.getLogger("rollout")


class MapOptions(TypedDict, total=False):
    """Options of `submit` and `map`: `[run]` of a configuration of `rollout map`, with the same defaults
    (`RunSection`). `code` is the directory with the function. `args` and `kwargs` are JSON values for the function
    besides the row, or for the constructor of a class. `lanes` are the values that `lane_key` may have."""

    code: str | Path | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    timeout_s: float
    max_attempts: int
    retry_backoff_s: float
    concurrency: int
    concurrency_per_process: int
    lane_key: str
    lanes: Iterable[str]
    gpus: int
    memory: str | float
    max_rows_per_process: int
    name: str
    priority: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a row. `row` counts from 1; `seconds` is the duration of the last attempt."""

    row: int
    result: Any
    error: RowError | None
    attempts: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> Any:
        """Return the result. Raises RowFailed if there is none."""
        if self.error is not None:
            raise RowFailed(self.row, self.error)
        return self.result


class RowFailed(RolloutError):
    """A row has no result. The message contains its error with the worker's traceback; `row` and `error` have the
    parts."""

    code = "row_failed"

    def __init__(self, row: int, error: RowError) -> None:
        traceback = f"\n\n{error.traceback}" if error.traceback else ""
        super().__init__(f"row {row}: {error}{traceback}")
        self.row = row
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return (RowFailed, (self.row, self.error))


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run: running, paused, completed, failed, killed or interrupted. Counts are of rows."""

    state: str
    submitted: int
    done: int
    failed: int
    running: int
    workers: int
    reason: str = ""


class RunEnded(RolloutError):
    """The run ended before all of its rows had results: it was killed, or no worker can load its function. The message
    says why, and where in the code."""

    code = "run_ended"


@dataclass(slots=True)
class _Submission:
    """The submission of a run's rows, in progress or ended."""

    feed: Feed
    task: asyncio.Task[int]
    is_reported: bool = False
    """Whether the caller knows how the submission ended."""

    def result(self) -> int:
        self.is_reported = True
        return self.task.result()

    def unreported(self) -> BaseException | None:
        """Return the error that ended the submission, if the caller does not know it yet."""
        ended = self.task.done() and not self.task.cancelled()
        return self.task.exception() if ended and not self.is_reported else None

    async def cancel(self) -> None:
        self.is_reported = True
        self.feed.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class AsyncRun:
    """A run at a cluster, as `submit` returns it and `AsyncCluster.run` finds it again."""

    def __init__(self, cluster: AsyncCluster, run_id: str, submission: _Submission | None) -> None:
        self.id = run_id
        self._cluster = cluster
        self._submission = submission

    @property
    def _session(self) -> RunSession:
        return RunSession(self._cluster.runs, self.id, self._cluster.failure)

    async def submitted(self) -> int:
        """Wait until all rows are submitted, and return their number; the run then no longer needs this process. Raises
        what the rows raised, or RunEnded if the run ends first."""
        if self._submission is not None:
            await self._cluster.wait_for({self._submission.task})
            if not self._submission.task.cancelled():
                return self._submission.result()
            raise _ended(self.id, await self._session.runs.get(self.id))
        async with aclosing(self._session.statuses()) as statuses:  # another process submits them
            async for status, last in statuses:
                if status.sealed:
                    return status.submitted
                if last:
                    raise _ended(self.id, status)
        raise RunEnded(f"run {self.id} cannot be watched any longer")

    async def state(self) -> RunState:
        """Return the state in the ledger. Raises NotFoundError."""
        return _state(await self._session.runs.get(self.id))

    async def wait(self) -> RunState:
        """Wait until the run has ended in any way. Raises what the rows raised."""
        async with aclosing(self._pages(0, status_only=True)) as pages:
            async for page in pages:
                if page.last:
                    return _state(page.status)
        raise RunEnded(f"run {self.id} cannot be watched any longer")

    async def results(self, *, start: int = 1) -> AsyncGenerator[Outcome, None]:
        """Yield outcomes in order from row `start` on, as they arrive. Raises what the rows raised, or RunEnded if the
        run ends before all outcomes exist, for example because no worker can load the function."""
        async with aclosing(self.pages(start=start)) as pages:
            async for outcomes in pages:
                for outcome in outcomes:
                    yield outcome

    async def pages(self, *, start: int = 1) -> AsyncGenerator[list[Outcome], None]:
        """Yield what `results` does, several outcomes at a time."""
        async with aclosing(self._pages(start - 1, status_only=False)) as pages:
            async for page in pages:
                if page.entries:
                    outcomes = [outcome_of(entry) for entry in page.entries]
                    yield outcomes
                    if self._submission is not None:
                        self._submission.feed.consumed(len(outcomes))
                if page.last and page.status is not None and page.status.state != _ENDED_WELL:
                    raise _ended(self.id, page.status)

    async def cancel(self) -> None:
        """Kill the run and its running rows. Has no effect if the run has ended."""
        if self._submission is not None:
            await self._submission.cancel()
        await self._session.kill("cancelled by its client")

    async def _pages(self, cursor: int, *, status_only: bool) -> AsyncGenerator[Page, None]:
        submission = self._submission
        beside = submission.task if submission is not None else None
        pages = self._session.watch(cursor, status_only=status_only, beside=beside)
        try:
            async with aclosing(pages):
                async for page in pages:
                    if page.last and submission is not None and submission.feed.failed:
                        await asyncio.wait({submission.task})  # it has killed the run, and says in a moment why
                        submission.result()
                    yield page
        except BaseException as error:
            if submission is not None and submission.unreported() is error:
                submission.is_reported = True
            raise


class AsyncCluster:
    """A cluster to run functions on, from `async with rollout.connect_async(...)` or `rollout.local_async(...)`."""

    def __init__(
        self, open_runs: Callable[[AsyncExitStack], Any], directory: Path | None = None, *, is_temporary: bool = False
    ) -> None:
        self._open = open_runs
        self._is_temporary = is_temporary  # its ledger is gone when it is left
        self._leave_out = [directory] if directory is not None else []  # its own files are no code
        self._stack = AsyncExitStack()
        self._runs: Runs | None = None
        self.failure: asyncio.Future[None] | None = None
        self._submitting: dict[AsyncRun, _Submission] = {}
        self._mapping: set[AsyncRun] = set()

    @property
    def runs(self) -> Runs:
        """The underlying client."""
        if self._runs is None:
            raise StateError("the cluster is not open: use it in a `with` statement")
        return self._runs

    async def __aenter__(self) -> Self:
        try:
            self._runs, self.failure = await self._open(self._stack)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.drain(kind)
        finally:
            await self.close()

    async def drain(self, kind: type[BaseException] | None) -> None:
        """Wait until the rows of all submitted runs are at the cluster; for iterables without a length, at most
        LEAVE_S.

        `kind` is the exception that leaves the cluster: Ctrl-C and cancellation do not wait. Raises what the rows
        raised, unless the caller has seen it or another exception is being raised.
        """
        if kind is not None and not issubclass(kind, Exception | SystemExit):
            return
        submissions = {run.id: one for run, one in self._submitting.items() if run not in self._mapping}
        for submission in submissions.values():
            submission.feed.lift_window()
        await self.wait_for([one.task for one in submissions.values()], LEAVE_S)
        await self.wait_for([one.task for one in submissions.values() if one.feed.is_finite])
        for run_id, submission in submissions.items():
            error = submission.unreported()
            if error is not None and kind is None:
                raise error
            if error is not None:
                _log.warning("run %s: its rows ended with %s: %s", run_id, type(error).__name__, error)

    async def close(self) -> None:
        """Kill the runs that cannot continue without this process: those with unsubmitted rows or unread outcomes of
        `map`."""
        try:
            open_ = {run: submission for run, submission in self._submitting.items() if not submission.task.done()}
            for run, submission in open_.items():
                if run not in self._mapping:
                    _log.warning(
                        "run %s is killed: it had %d rows, and more were to come; call run.submitted() within the "
                        "`with` statement to wait for all of them", run.id, submission.feed.handed,
                    )  # fmt: skip
            for run in {*open_, *self._mapping}:
                with suppress(RolloutError):
                    await run.cancel()
            if self._is_temporary and self._runs is not None:
                await self._warn_of_unfinished(self._runs)
        finally:
            self._runs = None
            await self._stack.aclose()

    async def _warn_of_unfinished(self, runs: Runs) -> None:
        if self.failure is not None and self.failure.done():
            return
        for status in await runs.list(["running", "paused"]):
            _log.warning(
                "run %s ends with its cluster, after %d of %d rows: call run.wait() within the `with` statement, or "
                "give rollout.local a directory, where a later one finds it", status.spec.run_id, status.cursor,
                status.submitted,
            )  # fmt: skip

    async def wait_for(self, futures: Collection[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
        """Wait until all are done, or for `timeout_s`. If the cluster's own processes end, raises why."""
        if futures:
            await unless(asyncio.wait(futures, timeout=timeout_s), self.failure)

    async def find(self, run: str) -> AsyncRun:
        """Find a run that was submitted earlier, here or elsewhere, by id, unique part of the id, or name (the newest
        with that name). Raises NotFoundError, or ConfigError if several runs match."""
        if is_ulid(run.upper()):
            return self.run(run.upper())
        found = await self.runs.find(run)
        meant = {one.run_id for one in found if means(one.run_id, run)}
        meant |= {one.run_id for one in [one for one in found if one.name == run][:1]}
        if not meant:
            raise NotFoundError(f"there is no run {run!r}: it is no run's id, short id or name")
        if len(meant) > 1:
            raise ConfigError(f"{run!r} may be any of {len(meant)} runs: {', '.join(sorted(map(short, meant)))}")
        return self.run(meant.pop())

    def run(self, run_id: str) -> AsyncRun:
        """Return the run with this full id; `find` accepts parts of ids, and names."""
        return AsyncRun(self, check_ulid(run_id, "run_id"), None)

    async def submit(
        self,
        function: Function,
        rows: Iterable[Any] | AsyncIterable[Any],
        *,
        window: int | None = None,
        **options: Unpack[MapOptions],
    ) -> AsyncRun:
        """Start a run of `function` over `rows`, which are read while the run proceeds. Raises ConfigError if it cannot
        start.

        `rows` are JSON values, and the iterable is read in a thread of its own. They are submitted as fast as the
        cluster accepts them, or with at most `window` rows whose outcomes are unread. Once all rows are submitted, the
        run needs this process no longer. `AsyncRun.submitted` waits for that, and so does leaving the cluster (at most
        30 s if `rows` has no length), which kills the run if it fails. `options` are `MapOptions`.
        """
        run = _run_section(options)
        if window is not None and window < _WINDOW_MIN:
            raise ConfigError(f"window: must be at least {_WINDOW_MIN}, not {window}")
        call, directory = resolve_with(function, options)
        found: Code | None = None
        if isinstance(function, str) or directory is not None:
            find = partial(find_code, call.function, directory, self._leave_out, check=call.check)
            found = await asyncio.to_thread(find)
        config = run_config(call, found.manifest if found else None, run)
        if run.lane_key:
            config["lanes"] = sorted(set(options.get("lanes", ())))
            if not config["lanes"]:
                raise ConfigError("lane_key needs lanes: the values that the field may have")
        spec = map_spec(new_ulid(), config)
        await self.runs.open(spec)
        if found is not None:
            await self._upload(spec.run_id, found)
        if isinstance(rows, AsyncIterable):
            rows = AsyncRows(rows, asyncio.get_running_loop())
        feed = Feed(rows, Planner(config), run.lane_key, frozenset(config.get("lanes", ())), window)
        submission = _Submission(feed, asyncio.ensure_future(self._submit(spec, feed)))
        submitted = AsyncRun(self, spec.run_id, submission)
        self._submitting[submitted] = submission
        submission.task.add_done_callback(lambda _: self._forget(submitted, submission))
        return submitted

    def _forget(self, run: AsyncRun, submission: _Submission) -> None:
        if submission.unreported() is None:
            self._submitting.pop(run, None)

    async def _upload(self, run_id: str, code: Code) -> None:
        await self.runs.upload_tree(run_id, code.directory, files=code.files, expected=code.tree.id)

    async def _submit(self, spec: Any, feed: Feed) -> int:
        runs = self.runs
        feed.start()
        try:
            return await runs.submit(spec, lambda _: feed.items())
        except asyncio.CancelledError:
            if not feed.is_closed:  # the event loop ends, rather than somebody cancels the run
                _log.warning("run %s is left open: %d of its rows were submitted", spec.run_id, feed.handed)
            raise
        except RolloutError as error:
            cause: BaseException = error
            feed.failed = True
            if isinstance(error, RowsError) and error.__cause__ is not None:
                cause = error.__cause__
            try:
                await runs.command(spec.run_id, "kill", reason=f"its rows ended with {type(cause).__name__}: {cause}")
            except RolloutError:
                _log.warning("run %s is left open: it could not be killed", spec.run_id)
            if not isinstance(cause, Exception):
                raise  # SystemExit and the like would end the event loop instead of reaching the caller
            raise cause from None
        finally:
            feed.close()

    async def map(
        self,
        function: Function,
        rows: Iterable[Any] | AsyncIterable[Any],
        *,
        window: int = WINDOW,
        **options: Unpack[MapOptions],
    ) -> AsyncGenerator[Outcome, None]:
        """Yield outcomes of `function` over `rows`, lazily and in order. `options` are those of `submit`.

        At most `window` rows are read ahead of the last outcome taken, so `rows` may be endless. Stopping early, by
        `break` out of an `aclosing` or by an exception, kills the run.
        """
        run = await self.submit(function, rows, window=window, **options)
        self._mapping.add(run)
        whole = False
        try:
            async with aclosing(run.results()) as outcomes:
                async for outcome in outcomes:
                    yield outcome
            whole = True
        finally:
            self._mapping.discard(run)
            if not whole:
                await asyncio.shield(run.cancel())


def resolve_with(function: Function, options: MapOptions) -> tuple[Call, Path | None]:
    """Call `resolve` with the options that concern it."""
    per_process = options.get("concurrency_per_process", 0)
    return resolve(function, options.get("code"), options.get("args", ()), options.get("kwargs"), per_process)


def _run_section(options: MapOptions) -> RunSection:
    """Return the checked options. Raises ConfigError with every fault."""
    if unknown := sorted(options.keys() - MapOptions.__annotations__.keys()):
        raise TypeError(f"there is no option {', '.join(unknown)}; there are {', '.join(MapOptions.__annotations__)}")
    values = {key.removesuffix("_s"): value for key, value in options.items() if key not in _OF_CALL}
    try:
        return RunSection.model_validate(values)
    except ValidationError as error:
        names = [(".".join(map(str, e["loc"])) or "options", e) for e in error.errors(include_url=False)]
        raise ConfigError(problems(f"{name}: {describe(e, name)}" for name, e in names)) from error


def _ended(run_id: str, status: Any) -> RunEnded:
    reason = f": {status.reason}" if status.reason else ""
    return RunEnded(f"run {run_id} is {status.state}{reason}")


def _state(status: Any) -> RunState:
    return RunState(
        status.state, status.submitted, status.done, status.failed, status.running, status.workers, status.reason
    )


def outcome_of(entry: CommitEntry) -> Outcome:
    result: Any = None
    if entry.outcome is ItemOutcome.DONE:
        try:
            result = parse_result(entry.data)
        except InvalidResultError as error:
            entry = as_failed(entry, error)
    return Outcome(
        row=entry.seq + 1,
        result=result,
        error=None if entry.outcome is ItemOutcome.DONE else row_error(entry),
        attempts=entry.tries,
        seconds=entry.duration_ms / 1000,
    )


# ---- clusters


def connect_async(
    address: str | Iterable[str] | None = None, *, tls_dir: str | Path | None = None, patience_s: float = 60.0
) -> AsyncCluster:
    """Do what `connect` does, for asyncio."""
    addresses = [address] if isinstance(address, str) else list(address or ())

    async def open_runs(stack: AsyncExitStack) -> tuple[Runs, None]:
        target = need_target(addresses, Path(tls_dir) if tls_dir is not None else None)
        if target.private is not None:
            target = owned(target)
            if not target.addresses:
                raise ConfigError(
                    f"nobody runs the {target} at present: use rollout.local(directory=...), or connect to a cluster"
                )
        return await stack.enter_async_context(await _connect(target, patience_s)), None

    return AsyncCluster(open_runs)


def local_async(workers: int | Literal["auto"] = 1, *, directory: str | Path | None = None) -> AsyncCluster:
    """Do what `local` does, for asyncio."""
    count: Any = auto_count(workers)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f'workers: must be at least 1, or "auto", not {workers!r}')

    async def open_runs(stack: AsyncExitStack) -> tuple[Runs, asyncio.Future[None]]:
        if directory is None:
            scratch = Scratch("rollout-local-")
            stack.callback(scratch.cleanup)
            place = Path(scratch.name)
        else:
            place = Path(directory)
        embedded = Embedded(place, workers=count, report=_log.info)
        stack.push_async_callback(embedded.stop)
        await embedded.start()
        target = Target([embedded.address], embedded.tls_dir, "rollout", explicit=True)
        return await stack.enter_async_context(await _connect(target, 900.0)), embedded.failure

    place = Path(directory) if directory is not None else None
    return AsyncCluster(open_runs, place, is_temporary=directory is None)


async def _connect(target: Target, patience_s: float) -> Runs:
    return await Runs.connect(target.addresses, tls_dir=target.tls_dir, cluster=target.cluster, patience_s=patience_s)
