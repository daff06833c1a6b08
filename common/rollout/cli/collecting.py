"""A run whose results a command writes to files: it submits and collects concurrently, and ends the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, TypeVar

from rollout.cli.boundary import FAILED, OK
from rollout.cli.interrupt import Interrupted
from rollout.cli.progress import Display, Rates, Snapshot
from rollout.cli.run_rows import InputRows
from rollout.cli.show import figures_of
from rollout.cli.telling import NO_WORKERS_S, Telling
from rollout.cli.words import counted, duration, first_line, of_unit, were, when
from rollout.client import Page, Runs
from rollout.client.beside import Beside
from rollout.client.run_session import RunSession, unless
from rollout.model.errors import IncompleteError, InputError, NotFoundError, OutputChangedError, StateError
from rollout.model.ids import short
from rollout.model.run import END_ON_FAILURE, ENDED, RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.carrying import CARRIED
from rollout.workloads.collector import Attempts, Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Running, StatusTable, Workload

_RESUMABLE = ("paused", "interrupted", "failed", "killed")
_ENDED_BY_IT = {"interrupted": "was interrupted", "failed": "failed", "killed": "was killed", "paused": "is paused"}
ERRORS = "errors.jsonl"
_FOLLOWED = "another run takes its place"
_AT_ONCE = 100
"""Number of entries that are written together; what was fetched for them is fetched again if the command is killed."""
_SHOWN_RUNNING = 200
REWRITES_MAX = 3
"""Number of times that files which somebody else changes are rewritten before the command gives up."""
HANGS_S = 5.0
"""Seconds without a result after which Ctrl-C also says how to end a unit that hangs."""
RESTED_S = 10.0
"""Seconds that nobody worked at a run, and at least half its working time, before its end mentions them."""
T = TypeVar("T")


async def to_its_end(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run `function` in a thread to its end, even if the caller is cancelled.

    It writes files, and `close` must not write them concurrently, because the saved cursor would not match them. The
    cancellation takes precedence over an error of the function.
    """
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


def _killed(status: pb.RunStatus) -> str:
    reason = f": {status.reason.rstrip('.')}" if status.reason else ""
    return f"run {short(status.spec.run_id)} was killed by the {status.ended_by} at {when(status.ended_ms)}{reason}"


def _lasted(durations: JsonObject) -> str:
    """Return the duration as `4.2 s`, or as `4.2 s of work (8:03 in all)` if nobody worked for a good part of it."""
    wall_s = durations["wall_s"]
    busy_s = durations.get("busy_s", wall_s)
    rested = wall_s - busy_s > max(RESTED_S, busy_s / 2)
    return f"{busy_s:.1f} s of work ({duration(wall_s)} in all)" if rested else f"{wall_s:.1f} s"


class Collecting:
    """Writes the commit log of `session`'s run to the files of `collector`."""

    def __init__(self, session: RunSession, collector: Collector, display: Display) -> None:
        self._session = session
        self._collector = collector
        self._display = display

    async def add(self, entries: Sequence[CommitEntry], *, place: bool = True) -> None:
        """Write entries. `place` also stores the files that belong to each unit beside its lines."""
        if place:
            for told in await self._collector.place(entries, self._session):
                self._display.note(f"warning: {told}")
        await to_its_end(self._collector.add, entries)

    async def finish(self, read: Callable[[], Awaitable[pb.RunStatus]]) -> tuple[pb.RunStatus, JsonObject]:
        """Return the status from `read` and the summary once all entries are in the files.

        `read` adds entries from the collector's cursor on. Raises OutputChangedError if somebody keeps changing the
        files.
        """
        rewritten = 0
        while True:
            try:
                status = await read()
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
                return status, summary
            except OutputChangedError as error:
                rewritten += 1
                if rewritten > REWRITES_MAX:
                    raise
                self._display.note(f"note: {error.message}; it is written anew from the ledger")
                await to_its_end(self._collector.restart)


class CollectedRun(RunSession):
    """A run that a command submits and whose files it writes. Call `open`, then `carry_out`, and `close` in any case.

    `config` is the run's own configuration, which may be older than that of its `rows`. `beside` runs concurrently.
    """

    def __init__(
        self,
        workload: Workload[Any, Any],
        runs: Runs,
        run_id: str,
        config: JsonObject,
        rows: InputRows,
        collector: Collector,
        display: Display,
        place: OutputPlace,
        *,
        name: str = "",
        beside: Sequence[Beside] = (),
        failure: asyncio.Future[None] | None = None,
    ) -> None:
        super().__init__(runs, run_id, failure)
        self._workload = workload
        self._name = name
        self._config = config
        self._rows = rows
        self._collector = collector
        self._files = Collecting(self, collector, display)
        self._display = display
        self._place = place
        self._beside = beside
        self._rates = Rates()
        self._telling = Telling(display)
        self._over = False
        self._asked = asyncio.Event()
        self._idle = False  # all that runs only waits
        self._collecting = False
        self._last: pb.RunStatus | None = None
        self._moved_at = time.monotonic()
        self._seen_final: int = -1
        self._starting = False  # workers of a private cluster, of which none has come yet

    @property
    def total(self) -> int:
        """Number of units of the input; if more may come, the number so far."""
        return self._rows.total(self.submitted)

    @property
    def written(self) -> str:
        """Part of the run that is in the output files, in the unit that users count: `2 of 19 rows`."""
        board = self._collector.board([], 0) if self.committed == self._collector.cursor else None
        unit, done, total = self._workload.unit, self.committed, self.total
        if board is not None and board.extent is not None:
            unit, done, total = board.extent
        return f"{done:,} of {of_unit(total, unit)}"

    @property
    def committed(self) -> int:
        """Number of units that are durably in the output files; a second Ctrl-C leaves out what is not yet written."""
        return self._collector.saved

    async def open(self, *, resumed: bool, go_on: bool = False, command: str = "") -> pb.RunStatus:
        """Open the run and return its status; it is running unless it is complete.

        Raises StateError if somebody killed the run, unless `go_on` is set, which `command` does.
        """
        status = await self.runs.open(self._spec)
        if status.state in _RESUMABLE:
            if status.state == "killed" and status.ended_by and not go_on:
                raise StateError(f"{_killed(status)}. Go on with it: {command}")
            because = f" ({first_line(status.reason).rstrip('.')})" if status.reason else ""
            over = status.state == "failed" and self._is_over(status.failed)
            ended = f"run {short(self.run_id)} {_ENDED_BY_IT[status.state]}{because}"
            one = of_unit(1, self._workload.unit).partition(" ")[2]
            final = f"a {one} that failed is final, and nothing of its run can come after it"
            self._display.note(f"{ended}: {final if over else 'it goes on'}")
            if not over:
                status = await self.runs.command(self.run_id, "resume", reason="the same command was given again")
        self.submitted = status.submitted
        self._display.event(
            "run_opened",
            f"run {short(self.run_id)}: {self._rows.opening(status, resumed=resumed)}",
            run_id=self.run_id,
            resumed=resumed,
            address=self.runs.address,
            **{self._workload.unit: self.total},
        )
        return status

    @property
    def _spec(self) -> RunSpec:
        return replace(self._workload.spec(self.run_id, self._config), name=self._name)

    def _is_over(self, failed: int) -> bool:
        """Return whether so many units failed for good that the run can do nothing more."""
        return failed > 0 and END_ON_FAILURE in self._spec.policies

    async def carry_out(self, *, detach: str = "") -> int:
        """Submit, collect and return the exit code once everything is in the files.

        `detach` is the command that collects later; this one then ends when everything is submitted.
        """
        self._starting = self.failure is not None
        submitting = asyncio.ensure_future(self._rows.submit(self, self._spec))
        pausing = asyncio.ensure_future(self._pause_when_asked())
        collecting = None if detach else asyncio.ensure_future(self._collect())
        self._collecting = collecting is not None
        for one in self._beside:
            one.start()
        jobs: list[asyncio.Future[Any]] = [
            submitting,
            pausing,
            *(one.job for one in self._beside),
            *([collecting] if collecting else []),
        ]
        try:
            # A run that was killed takes no more rows.
            await unless(asyncio.wait([collecting or submitting]), *jobs, self.failure)
            for one in self._beside if collecting is not None else ():
                await one.finish(self._collector.cursor)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        if collecting is None:
            self._display.note(f"all {self._workload.unit} are submitted; the cluster goes on without this command")
            self._display.note(f"this collects the results, and starts nothing again: {detach}")
            return OK
        status, summary = collecting.result()
        made, directory = list[str](), self._place.directory
        if status.state in ("completed", "failed"):
            made = await self._workload.finished(self.fetch, self._config, directory, summary, self._display.note)
        await self._place.publish(self._collector.cursor)
        return self._finish(status, summary, made)

    @property
    def finishing(self) -> bool:
        """Whether no further unit is started and the running ones are waited for."""
        return self._asked.is_set()

    @property
    def completed(self) -> bool:
        """Whether the run is complete and everything is in the files."""
        return self._over and self._last is not None and self._last.state == "completed"

    @property
    def may_hang(self) -> bool:
        """Whether units run without a time limit and none has had its result for a while."""
        quiet = time.monotonic() - self._moved_at >= HANGS_S and self._last is not None and self._last.running > 0
        return quiet and bool(self._workload.changeable) and not self._workload.limits(self._config).timeout_ms

    def finish_running(self) -> bool:
        """Start no further unit, wait for the running ones, then raise Interrupted.

        Returns False if the workload does not support it or there is nothing to wait for.
        """
        if not self._collecting or self._over:
            return False
        if self._rows.drain(self, self._last, self._display):
            return True
        if not self._workload.finishes_running:
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

    async def _pause_when_asked(self) -> None:
        await self._asked.wait()
        await self.pause("interrupted")

    async def end(self) -> bool:
        """Start no further unit, finish the running ones and collect all results. Returns False if the cluster no
        longer knows the run."""
        try:
            status = await self.runs.get(self.run_id)
            if status.state == "running":
                status = await self.runs.command(self.run_id, "pause", reason=_FOLLOWED, own=True)
            await self._follow(until_quiet=True)
            if status.state in ("paused", "interrupted"):
                await self.kill(_FOLLOWED)
        except NotFoundError:
            return False
        await to_its_end(self._collector.flush)
        return True

    def close(self) -> None:
        """Make everything that was collected durable. Blocking."""
        try:
            # A file that was changed meanwhile is the next command's to write anew.
            with suppress(OutputChangedError):
                self._collector.flush()
                if not self._over and self._last is not None:
                    ended = self._last.state in ENDED
                    self._collector.refresh(self._last.state if ended else "interrupted")
            for one in self._beside:
                one.save()
        finally:
            self._collector.close()

    async def _collect(self) -> tuple[pb.RunStatus, JsonObject]:
        """Return the final status and the summary once all results are in the files."""
        ended = await self._files.finish(self._to_its_end)
        self._over = True
        return ended

    async def _to_its_end(self) -> pb.RunStatus:
        status = await self._follow()
        if status.state not in ENDED:
            raise Interrupted
        if self._rows.open_ended:
            self._collector.expect(status.submitted)
        return status

    async def _follow(self, *, until_quiet: bool = False) -> pb.RunStatus:
        """Follow the run to its end, or with `until_quiet` until it is paused and none of its units runs."""
        async with aclosing(self.watch(self._collector.cursor, payloads=True)) as pages:
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
            await self._files.add(entries)
            for entry in entries:
                for name, message, fields in self._workload.remarks(entry):
                    self._display.event(name, message, **fields)
            self._rows.committed(self._collector.cursor)
        if page.status is not None:
            await self._taken(page.status)

    async def _taken(self, status: pb.RunStatus) -> None:
        """Write to the files what was committed before `status`."""
        self._last = status
        await to_its_end(self._collector.flush)
        if not self._config.get(CARRIED):  # else the whole files of the run before stand there until the end
            self._place.publish_soon(self._collector.cursor)
        if self._place.lost:
            self._rows.leave(f"another command writes to {self._place.shown} by now", self._display)
        for one in self._beside:
            one.flushed(self._collector.cursor)
        self._collector.watch(status.state, status.reason)
        await to_its_end(self._collector.refresh)
        snapshot = self._snapshot(status, await self._board(status))
        if self._starting:
            waits = not status.workers and status.state == "running"
            self._starting = waits and time.monotonic() - self._moved_at < NO_WORKERS_S
        if not self._starting:
            self._display.progress(snapshot)
        self._telling.tell(status, is_waiting=self._rows.is_waiting(status, self._final(status)))

    async def _board(self, status: pb.RunStatus) -> StatusTable | None:
        """Return the workload's table for the run, if it has one."""
        if not self._collector.shows:
            return None
        running: list[Running] = []
        if status.running:
            pages = self.runs.items(self.run_id, "running", limit=_SHOWN_RUNNING)
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
        self._rows.observe(status, final, per_s)
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
            state=state,
            unit=self._workload.unit,
            measure=self._workload.measure,
            note=status.note,
            figures=figures_of(status),
            waits=status.waits[0].message if status.waits and not status.workers else "",
            board=board,
            **self._rows.progress(total - done, per_s, status.workers, state),
        )

    def _final(self, status: pb.RunStatus) -> int:
        """Return the number of units that have their result."""
        return max(self._collector.cursor, status.done + status.failed + status.cancelled + status.skipped)

    def _finish(self, status: pb.RunStatus, summary: JsonObject, made: list[str]) -> int:
        self._display.close()
        files = self._place.files(self._workload.result_files, made)
        refusal = self._workload.failed(summary).refusal if status.state == "failed" else ""
        self._display.event("summary", "" if refusal else self._text(summary, files), **summary, files=files)
        if refusal:
            ended = f"run {short(self.run_id)} has ended; when this is mended, the same command starts another one"
            raise InputError(f"{refusal}\n{ended}")
        if status.state == "completed" and not self._collector.complete:
            of = of_unit(self.total, self._workload.unit)
            raise IncompleteError(
                f"run {short(self.run_id)} is completed with {self._collector.cursor} of the {of} of the input: it was "
                "sealed when the input was another. Name another output directory to start a new run"
            )
        for one in self._beside:
            one.check()
        return self._workload.exit_code(summary) if status.state == "completed" else FAILED

    def _text(self, summary: JsonObject, files: dict[str, str]) -> str:
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
            how = "cannot begin" if self._is_over(units["failed"]) else f"{'is' if left == 1 else 'are'} unharmed"
            lines.append(f"{of_unit(left, unit)} {how}: {self._workload.failed(summary).recovery_hint}")
        lines.append("files: " + ", ".join(files.values()))
        if also := self._workload.see_also(self._place.directory):
            lines.append(f"see {also}")
        return "\n".join(lines)
