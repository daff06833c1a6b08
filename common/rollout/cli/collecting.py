"""One run at a cluster: submitting and collecting at the same time, and telling of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rollout.cli.boundary import FAILED, OK
from rollout.cli.interrupt import Interrupted
from rollout.cli.printed import Reader, left_out_text, printed
from rollout.cli.progress import Display, Rates, Snapshot, eta
from rollout.cli.run_ledger import RunLedger
from rollout.cli.show import cannot_start, cause_json, figures_of, waiting
from rollout.cli.words import counted, duration, first_line, of_unit, were, when
from rollout.client import Page, Runs
from rollout.client.intake import Intake, Items
from rollout.client.publish import Publisher
from rollout.model.errors import (
    IncompleteError,
    InputChangedError,
    InputError,
    NotFoundError,
    OutputChangedError,
    StateError,
    UnavailableError,
)
from rollout.model.ids import short
from rollout.model.item import NewItem
from rollout.model.run import ENDED
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.carrying import CARRIED
from rollout.workloads.collector import Attempts, Collector
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import Checked, Running, StatusTable, Workload
from rollout.workloads.publishing import BucketOutput

_RESUMABLE = ("paused", "interrupted", "failed", "killed")
_ENDED_BY_IT = {"interrupted": "was interrupted", "failed": "failed", "killed": "was killed", "paused": "is paused"}
ERRORS = "errors.jsonl"
_FOLLOWED = "another run takes its place"
_AT_ONCE = 100
"""Entries that are written together: what was brought for them comes again when the command is killed meanwhile."""
_SHOWN_RUNNING = 200
REWRITES_MAX = 3
"""Times that files which somebody changes are written anew before the run is given up."""
IDLE_S = 30.0
"""A run that nobody works at for this long gets a line that says where to look."""
NO_WORKERS_S = 10.0
"""The same, when no worker is connected: those of a private cluster take a few seconds to come."""
IMPOSSIBLE_S = 5.0
"""The same, when no worker that is connected could ever take what it waits with."""
HANGS_S = 5.0
"""When nothing had a result for this long, Ctrl-C says how to end what hangs."""
LAST_LINES_S = 10.0
"""What was printed last comes a moment after the results."""
RESTED_S = 10.0
"""A run that nobody worked at for so long, and for half as long as it was worked at, says so at its end."""
GONE = {"disk_full": "there is room again", "store_unavailable": "the object store answers again"}
"""By code of a cause for which work waits in its midst: what is said when it is over."""
T = TypeVar("T")


async def to_its_end(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """In a thread; a cancellation waits for it. It writes files, and `close` must not do so beside it: the cursor that
    is saved would not fit what is in them. It comes before what the function raised, which would hide it."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from work.exception()
    return work.result()


def files_of(
    workload: Workload[Any, Any], directory: Path, made: Iterable[str] = (), remote: BucketOutput | None = None
) -> dict[str, str]:
    """The result files that are there, and those that were `made` beside them: name to path, or to URL where they are
    `remote`."""
    there = [directory / name for name in workload.result_files if (directory / name).exists()]
    paths = {path.name: path for path in (*there, *map(Path, made))}
    if remote is None:
        return {name: str(path) for name, path in paths.items()}
    return {name: remote.place(path.relative_to(directory).as_posix()) for name, path in paths.items()}


def _killed(status: pb.RunStatus) -> str:
    reason = f": {status.reason.rstrip('.')}" if status.reason else ""
    return f"run {short(status.spec.run_id)} was killed by the {status.ended_by} at {when(status.ended_ms)}{reason}"


def _lasted(durations: JsonObject) -> str:
    """`4.2 s`; of a run at which nobody worked for a good part of the time: `4.2 s of work (8:03 in all)`."""
    wall_s = durations["wall_s"]
    busy_s = durations.get("busy_s", wall_s)
    rested = wall_s - busy_s > max(RESTED_S, busy_s / 2)
    return f"{busy_s:.1f} s of work ({duration(wall_s)} in all)" if rested else f"{wall_s:.1f} s"


class WorkloadRun:
    """`open`, then `carry_out`; `close` always. `config` is the run's own, which may be older than `checked`'s."""

    def __init__(
        self,
        workload: Workload[Any, Any],
        runs: Runs,
        run_id: str,
        config: JsonObject,
        checked: Checked,
        collector: Collector,
        display: Display,
        name: str = "",
        remote: BucketOutput | None = None,
        *,
        intake: Intake | None = None,
        publisher: Publisher | None = None,
        show_output: bool = False,
    ) -> None:
        self._total = checked.total
        self._intake = intake
        self._publisher = publisher
        self._reader = Reader() if show_output else None
        self._unsent = 0
        self.run_id = run_id
        self.submitted = 0
        self._workload = workload
        self._runs = runs
        self._ledger = RunLedger(runs, run_id)
        self._config = config
        self._checked = checked
        self._spec = replace(workload.spec(run_id, config), name=name)
        self._collector = collector
        self._display = display
        self._remote = remote
        self._rates = Rates()
        self._over = False
        self._asked = asyncio.Event()
        self._idle = False  # all that runs only waits
        self._collecting = False
        self._last: pb.RunStatus | None = None
        self._busy_at = self._moved_at = time.monotonic()
        self._seen_final: int = -1
        self._idle_told = False
        self._starting = False  # workers of a private cluster, of which none has come yet
        self._skipping_told = False
        self._causes_told: dict[tuple[str, str, str], tuple[int, bool]] = {}

    @property
    def total(self) -> int:
        """Units of the input; of one that goes on: so far."""
        return self._total if self._intake is None else max(self.submitted, self._intake.taken)

    @property
    def written(self) -> str:
        """How much of the run is in the output files, in what people count: `2 of 19 rows`."""
        board = self._collector.board([], 0) if self.committed == self._collector.cursor else None
        unit, done, total = self._workload.unit, self.committed, self.total
        if board is not None and board.extent is not None:
            unit, done, total = board.extent
        return f"{done:,} of {of_unit(total, unit)}"

    @property
    def committed(self) -> int:
        """Units in the output files for good: a second Ctrl-C leaves what was not written yet."""
        return self._collector.saved

    async def open(self, *, resumed: bool, go_on: bool = False, command: str = "") -> pb.RunStatus:
        """The run as the ledger has it, running unless it is complete. StateError for one that somebody killed, unless
        it is to `go_on`, which `command` does."""
        status = await self._runs.open(self._spec)
        if status.state in _RESUMABLE:
            if status.state == "killed" and status.ended_by and not go_on:
                raise StateError(f"{_killed(status)}. Go on with it: {command}")
            because = f" ({first_line(status.reason).rstrip('.')})" if status.reason else ""
            over = self._workload.over(status.failed) if status.state == "failed" else ""
            ended = f"run {short(self.run_id)} {_ENDED_BY_IT[status.state]}{because}"
            self._display.note(f"{ended}: {over or 'it goes on'}")
            if not over:
                status = await self._runs.command(self.run_id, "resume", reason="the same command was given again")
        self.submitted = status.submitted
        if self._reader is not None and resumed:
            await self._skip_output(self._reader)
        done = status.done + status.failed
        unit, total = self._workload.unit, of_unit(self.total, self._workload.unit)
        if self._workload.may_be_fewer(self._config):
            total = f"at most {total}"
        about = f"going on, {done} of {total} have their result" if resumed else total
        if self._intake is not None and status.sealed:
            about = f"its intake has ended; {done} of the {total} that came have their result"
        elif self._intake is not None:
            so_far = f"going on, {done} of the {total} that came so far have their result; " if resumed else ""
            about = f"{so_far}takes {unit} from the queue {self._intake.source}"
        self._display.event(
            "run_opened",
            f"run {short(self.run_id)}: {about}",
            run_id=self.run_id,
            resumed=resumed,
            address=self._runs.address,
            **{unit: self.total},
        )
        return status

    async def carry_out(self, directory: Path, failure: asyncio.Future[None] | None, *, detach: str = "") -> int:
        """The exit code, when everything is in the files. `failure` ends it early, with its error. `detach`: the
        command that collects later; then this one is over when everything is submitted."""
        self._starting = failure is not None
        submitting = asyncio.create_task(self._submit())
        jobs: list[asyncio.Future[Any]] = [submitting, asyncio.create_task(self._pause_when_asked())]
        collecting: asyncio.Task[tuple[pb.RunStatus, JsonObject]] | None = None
        if not detach:
            collecting = asyncio.create_task(self._collect())
            jobs.append(collecting)
            self._collecting = True
        output = asyncio.create_task(self._show_output(self._reader)) if self._reader is not None else None
        if output is not None:
            jobs.append(output)
        if self._publisher is not None:
            self._publisher.start()
            jobs.append(self._publisher.job)
        waiting = set(jobs)
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    waiting | ({failure} if failure is not None else set()), return_when=asyncio.FIRST_COMPLETED
                )
                for job in done:
                    job.result()
                waiting -= done
                if submitting.done() if collecting is None else collecting.done():
                    break  # also of a run that was killed, which takes no more rows
            if output is not None and collecting is not None:
                await asyncio.wait([output], timeout=LAST_LINES_S)
            if self._publisher is not None:
                self._unsent = await self._publisher.finish(self._collector.cursor)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        if collecting is None:
            self._display.note(f"all {self._workload.unit} are submitted; the cluster goes on without this command")
            self._display.note(f"this collects the results, and starts nothing again: {detach}")
            return OK
        status, summary = collecting.result()
        made: list[str] = []
        if status.state == "completed":
            made = await self._workload.finished(
                self._ledger.fetch, self._config, directory, summary, self._display.note
            )
        elif status.state == "failed":
            made = await asyncio.to_thread(self._workload.failed, directory)
        if self._remote is not None:
            await self._remote.publish(self._collector.cursor)
        return self._finish(directory, status, summary, made)

    async def _show_output(self, reader: Reader) -> None:
        async for line in printed(self._runs, self.run_id, reader, follow=True):
            row = f"row {line.row}: " if line.row is not None else ""
            text = left_out_text(line) or line.text
            self._display.event("output", f"{row}{text}", row=line.row, stream=line.stream, text=text)

    async def _skip_output(self, reader: Reader) -> None:
        """What was printed before this command."""
        end = False
        while not end:
            reply = await self._runs.output(self.run_id, reader.position)
            end = reply.end
            for chunk in reply.chunks:
                reader.lines(chunk, reply.root_log)

    @property
    def finishing(self) -> bool:
        """Nothing more is started, and what runs is waited for."""
        return self._asked.is_set()

    @property
    def completed(self) -> bool:
        """It is, and everything is in the files."""
        return self._over and self._last is not None and self._last.state == "completed"

    @property
    def may_hang(self) -> bool:
        """Units run without a time limit, and none has had its result for a while."""
        quiet = time.monotonic() - self._moved_at >= HANGS_S and self._last is not None and self._last.running > 0
        return quiet and bool(self._workload.changeable) and not self._workload.limits(self._config).timeout_ms

    def finish_running(self) -> bool:
        """Start nothing more, wait for what runs, and raise Interrupted then. False: the workload does not do so, or
        there is nothing to wait for."""
        if self._intake is not None and self._collecting and not self._over:
            return self._drain(self._intake)
        if not self._workload.finishes_running or not self._collecting or self._over:
            return False
        unit, running = self._workload.unit, self._last.running if self._last is not None else 0
        those = f"the {running} that run" if running else "those that run"
        self._display.event(
            "finishing",
            f"no more {unit} are started; waiting for {those}. Ctrl-C once more abandons them",
            running=running,
        )
        self._asked.set()
        return True

    def _drain(self, intake: Intake) -> bool:
        unit, left = self._workload.unit, self.submitted
        if self._last is not None:
            status = self._last
            there = max(self.submitted, status.submitted)
            left = max(0, there - status.done - status.failed - status.cancelled - status.skipped)
        are = "is" if left == 1 else "are"
        doing = f"the {of_unit(left, unit)} that {are} in the run {are} being finished" if left else "the run ends"
        if self._last is not None and self._last.state != "running":
            doing = f"the run is {self._last.state}: `rollout run resume {short(self.run_id)}` finishes what is in it"
        self._display.event(
            "draining",
            f"no further message is taken, those that were received ahead are given back, and {doing}. Ctrl-C once "
            "more leaves at once: the same command goes on with them",
            unfinished=left,
        )
        intake.drain()
        return True

    def _stop_if_taken_over(self, remote: BucketOutput) -> None:
        """Another command goes on with the run, perhaps: the queue's rows are left to it."""
        if self._intake is not None and remote.lost and not self._intake.draining:
            self._display.note(f"warning: another command writes to {remote.url} by now: the intake ends")
            self._intake.drain()

    async def _pause_when_asked(self) -> None:
        await self._asked.wait()
        with suppress(StateError):  # it has ended, or is paused
            await self._runs.command(self.run_id, "pause", reason="interrupted", own=True)

    async def end(self) -> bool:
        """No further unit of it is started, those that run are finished, and all results are in the files. False: the
        cluster does not know it any more."""
        try:
            status = await self._runs.get(self.run_id)
            if status.state == "running":
                status = await self._runs.command(self.run_id, "pause", reason=_FOLLOWED, own=True)
            await self._follow(until_quiet=True)
            if status.state in ("paused", "interrupted"):
                with suppress(StateError):  # its last unit ended meanwhile, and so it did
                    await self._runs.command(self.run_id, "kill", reason=_FOLLOWED, own=True)
        except NotFoundError:
            return False
        await to_its_end(self._collector.flush)
        return True

    def close(self) -> None:
        """Whatever was collected is durable. Blocking."""
        try:
            # A file that was changed meanwhile is the next command's to write anew.
            with suppress(OutputChangedError):
                self._collector.flush()
                if not self._over and self._last is not None:
                    ended = self._last.state in ENDED
                    self._collector.refresh(self._last.state if ended else "interrupted")
            if self._publisher is not None:
                self._publisher.save()
        finally:
            self._collector.close()

    async def _submit(self) -> None:
        def progress(durable: int) -> None:
            self.submitted = max(self.submitted, durable)

        async def submit(items: Items, settle: Callable[[int], None]) -> int:
            def durable(count: int) -> None:
                progress(count)
                settle(count)

            return await self._runs.submit(self._spec, items, progress=durable)

        if self._intake is None:
            count = await self._runs.submit(self._spec, self._items, progress=progress)
        else:
            count = await self._intake.run(submit)
        self.submitted = max(self.submitted, count)

    def _items(self, start: int) -> Iterator[NewItem]:
        """As many as were counted by the check: a run must not be sealed with another number."""
        count = start
        for item in self._workload.plan(self._checked, self._config, start):
            count += 1
            if count > self.total:
                break
            yield item
        if count != self.total:
            more = "more" if count > self.total else f"only {count}"
            had = of_unit(self.total, self._workload.unit)
            raise InputChangedError(
                f"the input changed while it was read: it had {had} when it was checked, and now has {more}. "
                "Put it back as it was and run the same command again"
            )

    async def _collect(self) -> tuple[pb.RunStatus, JsonObject]:
        """The run's end and its summary, when all of it is in the files."""
        rewritten = 0
        while True:
            try:
                status = await self._follow()
                if status.state not in ENDED:
                    raise Interrupted
                if self._intake is not None:
                    self._collector.expect(status.submitted)
                summary = await to_its_end(
                    self._collector.finish,
                    status.state,
                    started_ms=status.created_ms,
                    ended_ms=status.ended_ms,
                    busy_ms=status.busy_ms,
                    attempts=Attempts(status.attempts, status.retried, status.worker_lost),
                    reason=status.reason,
                )
                await to_its_end(self._collector.refresh, status.state)
                self._over = True
                return status, summary
            except OutputChangedError as error:
                rewritten += 1
                if rewritten > REWRITES_MAX:
                    raise
                self._display.note(f"note: {error.message}; it is written anew from the ledger")
                await to_its_end(self._collector.restart)

    async def _follow(self, *, until_quiet: bool = False) -> pb.RunStatus:
        """To its end, or until it is paused and nothing of it runs any more, where that is what was asked for."""
        pages = self._runs.watch(self.run_id, self._collector.cursor, payloads=True)
        async with aclosing(pages):
            async for page in pages:
                await self._take(page)
                if page.status is not None and (
                    page.last or ((until_quiet or self.finishing) and self._is_quiet(page.status))
                ):
                    return page.status
        raise StateError(f"run {short(self.run_id)}: the commit log ended before the run")

    def _is_quiet(self, status: pb.RunStatus) -> bool:
        stands = status.state in ("paused", "interrupted") and (not status.pausing or self._idle)
        return stands and self._collector.cursor >= status.cursor

    async def _take(self, page: Page) -> None:
        for start in range(0, len(page.entries), _AT_ONCE):
            entries = page.entries[start : start + _AT_ONCE]
            for told in await self._collector.place(entries, self._ledger):
                self._display.note(f"warning: {told}")
            await to_its_end(self._collector.add, entries)
            for entry in entries:
                for name, message, fields in self._workload.remarks(entry):
                    self._display.event(name, message, **fields)
            if self._intake is not None:
                self._intake.committed(self._collector.cursor)
        if page.status is not None:
            self._last = page.status
            await to_its_end(self._collector.flush)
            if self._remote is not None:
                if not self._config.get(CARRIED):  # else the whole files of the run before stand there until the end
                    self._remote.publish_soon(self._collector.cursor)
                self._stop_if_taken_over(self._remote)
            if self._publisher is not None:
                self._publisher.flushed(self._collector.cursor)
            self._collector.watch(page.status.state, page.status.reason)
            await to_its_end(self._collector.refresh)
            snapshot = self._snapshot(page.status, await self._board(page.status))
            if self._starting:
                waits = not page.status.workers and page.status.state == "running"
                self._starting = waits and time.monotonic() - self._moved_at < NO_WORKERS_S
            if not self._starting:
                self._display.progress(snapshot)
            self._tell_skipping(page.status)
            self._tell_causes(page.status)
            self._tell_gone(page.status)
            self._tell_idle(page.status)

    def _tell_skipping(self, status: pb.RunStatus) -> None:
        if status.skips_rest and not self._skipping_told:
            self._skipping_told = True
            message = f"what has not begun is skipped: {first_line(status.reason)}; {status.running} still running"
            self._display.event("rest_skipped", message, reason=status.reason)

    def _tell_causes(self, status: pb.RunStatus) -> None:
        """Once each, and again when it has reached more workers, or all."""
        for cause in status.causes:
            about = (cause.executor, cause.code, cause.message)
            reached = (len(cause.workers), cause.everywhere)
            told = self._causes_told.get(about)
            if told is not None and told >= reached:
                continue
            self._causes_told[about] = reached
            if told is None:
                message = cannot_start(cause)
            else:
                where = "all workers that could run it" if cause.everywhere else f"{len(cause.workers)} workers"
                message = f"the same on {where} now ({cause.times} tries): {first_line(cause.message)}"
            self._display.event("cause", message, **cause_json(cause))

    def _tell_gone(self, status: pb.RunStatus) -> None:
        """What a run waited for in the middle of its work is there again."""
        there = {(cause.executor, cause.code, cause.message) for cause in status.causes}
        for about in [about for about in self._causes_told if about[1] in GONE and about not in there]:
            del self._causes_told[about]
            if status.state == "running" and not any(cause[1] == about[1] for cause in there):
                self._display.event("cause_gone", f"the run goes on: {GONE[about[1]]}", code=about[1])

    def _tell_idle(self, status: pb.RunStatus) -> None:
        quiet = self._intake is not None and self._final(status) >= status.submitted
        stuck = any(wait.impossible for wait in status.waits)  # what runs may wait for it
        if quiet or (status.running and not stuck) or status.causes or status.state != "running":
            self._busy_at, self._idle_told = time.monotonic(), False
            return
        idle_s = time.monotonic() - self._busy_at
        patience_s = IDLE_S
        if any(wait.reason == "no_workers" for wait in status.waits):
            patience_s = NO_WORKERS_S
        if stuck:
            patience_s = IMPOSSIBLE_S
        if self._idle_told or idle_s < patience_s:
            return
        self._idle_told = True
        starting = all(wait.reason == "chain" for wait in status.waits)  # the first of the chain does not run either
        why = "engines may still be loading; " if starting else f"what it waits for:\n{waiting(status)}\n"
        what = "no worker can take a part of this run" if status.running else "no worker has had anything of this run"
        self._display.note(
            f"{what} for {idle_s:.0f} s: {why}"
            "`rollout workers` lists those that are connected, `rollout-worker run` starts one"
        )

    async def _board(self, status: pb.RunStatus) -> StatusTable | None:
        """What the workload shows of the run, if it does."""
        if not self._collector.shows:
            return None
        running: list[Running] = []
        if status.running:
            pages = self._runs.items(self.run_id, "running", limit=_SHOWN_RUNNING)
            async with aclosing(pages):
                async for page in pages:
                    running += [
                        Running(
                            one.seq, max(0.0, time.time() - one.at_ms / 1000), one.message, one.attempts, one.worker
                        )
                        for one in page.items
                        if one.state == "running"
                    ]
        self._idle = len(running) == status.running and all(self._workload.idles(one.note) for one in running)
        return self._collector.board(running, status.running)

    def _snapshot(self, status: pb.RunStatus, board: StatusTable | None = None) -> Snapshot:
        final = self._final(status)
        if final != self._seen_final:
            self._seen_final, self._moved_at = final, time.monotonic()
        done, total = final, self.total
        if board is not None and board.extent is not None:
            _, done, total = board.extent
        per_s, measure_per_s = self._rates.add(done, status.units_out)
        self._observe(status, per_s)
        state = "pausing" if status.pausing and status.state == "paused" else status.state
        return Snapshot(
            total=self.total,
            submitted=max(self.submitted, status.submitted),
            done=status.done,
            failed=status.failed,
            invalid=status.invalid,
            committed=self._collector.cursor,
            running=status.running,
            workers=status.workers,
            per_s=round(per_s, 3),
            measure_per_s=round(measure_per_s, 3),
            eta_s=None if self._intake is not None else eta(total - done, per_s, workers=status.workers, state=state),
            state=state,
            unit=self._workload.unit,
            measure=self._workload.measure,
            note=status.note,
            figures=figures_of(status),
            waits=status.waits[0].message if status.waits and not status.workers else "",
            board=board,
            intake="" if self._intake is None else self._intake.state,
            waiting=None if self._intake is None else self._intake.depth,
        )

    def _final(self, status: pb.RunStatus) -> int:
        """Units that have their result."""
        return max(self._collector.cursor, status.done + status.failed + status.cancelled + status.skipped)

    def _observe(self, status: pb.RunStatus, per_s: float) -> None:
        """What the cluster can do is what is taken."""
        if self._intake is not None:
            active = status.state == "running"
            self._intake.observe(final=self._final(status), running=status.running, per_s=per_s, active=active)

    def _finish(self, directory: Path, status: pb.RunStatus, summary: JsonObject, made: list[str]) -> int:
        self._display.close()
        files = files_of(self._workload, directory, made, self._remote)
        refusal = self._workload.refusal(summary) if status.state == "failed" else ""
        self._display.event("summary", "" if refusal else self._text(summary, files, directory), **summary, files=files)
        if refusal:
            ended = f"run {short(self.run_id)} has ended; when this is mended, the same command starts another one"
            raise InputError(f"{refusal}\n{ended}")
        if status.state == "completed" and not self._collector.complete:
            of = of_unit(self.total, self._workload.unit)
            raise IncompleteError(
                f"run {short(self.run_id)} is completed with {self._collector.cursor} of the {of} of the input: it was "
                "sealed when the input was another. Name another output directory to start a new run"
            )
        if self._unsent and self._publisher is not None:
            raise UnavailableError(
                f"{self._unsent:,} of the {self._collector.cursor:,} results are in {directory}, and not in the output "
                f"queue: {self._publisher.why or 'it takes them too slowly'}. The same command sends them"
            )
        return self._workload.exit_code(summary) if status.state == "completed" else FAILED

    def _text(self, summary: JsonObject, files: dict[str, str], directory: Path) -> str:
        unit, measure, totals = self._workload.unit, self._workload.measure, self._collector.totals
        units = summary[unit]
        measured = (
            f", {summary[f'{measure}_per_s']:.0f} {measure}/s ({totals.units_in} + {totals.units_out} {measure})"
            if measure
            else ""
        )
        reason = summary.get("reason", "").partition("\n")[0]
        outcome = self._workload.outcome(summary) or (
            f"{units['completed']} of {of_unit(units['total'], unit)} completed in {_lasted(summary['durations'])}, "
            f"{summary[f'{unit}_per_s']:.1f} {unit}/s{measured}"
        )
        lines = [f"run {short(summary['run_id'])} {summary['state']}{f' ({reason})' if reason else ''}: {outcome}"]
        invalid, errors = units["invalid"], files.get(ERRORS, "")
        if failed := self._workload.failed_for_good(summary):
            lines.append(f"warning: {of_unit(failed, unit)} failed for good; why is in {errors}")
        if invalid:
            lines.append(f"{of_unit(invalid, unit)} left out as invalid; what is wrong is in {errors}")
        if units.get("cancelled"):
            lines.append(
                f"{of_unit(units['cancelled'], unit)} {were(units['cancelled'])} cancelled; by whom is in {errors}"
            )
        if lost := summary["attempts"]["worker_lost"]:
            again = " and repeated" if summary["state"] == "completed" else ""
            lines.append(f"{counted(lost, 'attempt')} {were(lost)} lost with the worker{again}")
        if summary["state"] == "failed" and units["committed"] < units["total"]:
            left = units["total"] - units["committed"]
            how = "cannot begin" if self._workload.over(units["failed"]) else f"{'is' if left == 1 else 'are'} unharmed"
            lines.append(f"{of_unit(left, unit)} {how}: {self._workload.recovery_hint(summary)}")
        lines.append("files: " + ", ".join(files.values()))
        if also := self._workload.see_also(directory):
            lines.append(f"see {also}")
        return "\n".join(lines)
