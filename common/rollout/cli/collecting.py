"""One batch at a cluster: submitting and collecting at the same time, and telling of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from rollout.cli.boundary import FAILED, OK
from rollout.cli.progress import Display, Rates, Snapshot
from rollout.client import Page, Runs
from rollout.model.errors import StateError
from rollout.model.run import RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.infer import Collector, InferConfig, plan

_AGAIN = {"paused": "resume", "interrupted": "continue", "failed": "continue", "killed": "continue"}
_FILES = ("completions.jsonl", "errors.jsonl", "summary.json", "openai.jsonl")
IDLE_S = 30.0
"""A run that nobody works at for this long gets a line that says where to look."""
T = TypeVar("T")


async def _to_its_end(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """In a thread; a cancellation waits for it. It writes files, and `close` must not do so beside it: the cursor that
    is saved would not fit what is in them."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    result = work.result()
    if cancelled is not None:
        raise cancelled
    return result


class BatchRun:
    """`open`, then `carry_out`; `close` always. `config` is the resolved configuration, `settings` the file's."""

    def __init__(
        self,
        runs: Runs,
        spec: RunSpec,
        settings: InferConfig,
        config: dict[str, Any],
        collector: Collector,
        display: Display,
        *,
        rows: int,
    ) -> None:
        self.rows = rows
        self.run_id = spec.run_id
        self.submitted = 0
        self._runs = runs
        self._spec = spec
        self._settings = settings
        self._config = config
        self._collector = collector
        self._display = display
        self._rates = Rates()
        self._busy_at = time.monotonic()
        self._idle_told = False

    @property
    def committed(self) -> int:
        """Rows in the output files."""
        return self._collector.cursor

    async def open(self, *, resumed: bool) -> pb.RunStatus:
        """The run as the ledger has it, running unless it is complete."""
        status = await self._runs.open(self._spec)
        if verb := _AGAIN.get(status.state):
            self._display.note(f"run {self.run_id} is {status.state}: {verb}")
            status = await self._runs.command(self.run_id, verb, reason="the same command was given again")
        self.submitted = status.submitted
        done = status.done + status.failed
        about = f"going on, {done} of {self.rows} rows have their result" if resumed else f"{self.rows} rows"
        self._display.event(
            "run_opened",
            f"run {self.run_id}: {about}",
            run_id=self.run_id,
            resumed=resumed,
            rows=self.rows,
            address=self._runs.address,
        )
        return status

    async def carry_out(self, directory: Path, failure: asyncio.Future[None] | None, *, detach: bool) -> int:
        """The exit code, when everything is in the files. `failure` ends it early, with its error."""
        submitting = asyncio.create_task(self._submit())
        jobs: list[asyncio.Future[Any]] = [submitting]
        collecting: asyncio.Task[pb.RunStatus] | None = None
        if not detach:
            collecting = asyncio.create_task(self._collect())
            jobs.append(collecting)
        waiting = set(jobs)
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    waiting | ({failure} if failure is not None else set()), return_when=asyncio.FIRST_COMPLETED
                )
                for job in done:
                    job.result()
                waiting -= done
                if collecting is not None and collecting.done():
                    break  # a run that was killed takes no more rows
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        if collecting is None:
            self._display.note(
                f"run {self.run_id}: {self.rows} rows submitted; the same command without --detach collects"
            )
            return OK
        return await self._finish(directory, collecting.result())

    def close(self) -> None:
        """Whatever was collected is durable. Blocking."""
        try:
            self._collector.flush()
        finally:
            self._collector.close()

    async def _submit(self) -> None:
        def progress(durable: int) -> None:
            self.submitted = max(self.submitted, durable)

        content_id = self._config["model"]["content_id"]
        count = await self._runs.submit(
            self._spec, lambda start: plan(self._settings, content_id, start=start), progress=progress
        )
        self.submitted = max(self.submitted, count)

    async def _collect(self) -> pb.RunStatus:
        pages = self._runs.watch(self.run_id, self._collector.cursor, payloads=True)
        async with aclosing(pages):
            async for page in pages:
                await self._take(page)
                if page.status is not None and page.last:
                    return page.status
        raise StateError(f"run {self.run_id}: the commit log ended before the run")

    async def _take(self, page: Page) -> None:
        if page.entries:
            await _to_its_end(self._collector.add, page.entries)
        if page.status is not None:
            await _to_its_end(self._collector.flush)
            self._display.progress(self._snapshot(page.status))
            self._tell_idle(page.status)

    def _tell_idle(self, status: pb.RunStatus) -> None:
        if status.running or status.state != "running":
            self._busy_at, self._idle_told = time.monotonic(), False
        elif not self._idle_told and time.monotonic() - self._busy_at >= IDLE_S:
            self._idle_told = True
            self._display.note(
                f"no worker has had a row of this run for {IDLE_S:.0f} s: their engines may still be loading; `rollout "
                "workers` lists those that are connected, `rollout-worker run` starts one"
            )

    def _snapshot(self, status: pb.RunStatus) -> Snapshot:
        final = status.done + status.failed + status.cancelled + status.skipped
        rows_per_s, tokens_per_s = self._rates.add(final, status.units_out)
        left = self.rows - final
        return Snapshot(
            rows=self.rows,
            submitted=max(self.submitted, status.submitted),
            done=status.done,
            failed=status.failed,
            committed=self._collector.cursor,
            running=status.running,
            workers=status.workers,
            rows_per_s=round(rows_per_s, 3),
            tokens_per_s=round(tokens_per_s, 3),
            eta_s=round(left / rows_per_s, 1) if rows_per_s > 0 else None,
        )

    async def _finish(self, directory: Path, status: pb.RunStatus) -> int:
        summary = await _to_its_end(
            self._collector.finish,
            status.state,
            started_ms=status.created_ms,
            ended_ms=status.ended_ms,
            worker_lost=status.worker_lost,
            reason=status.reason,
        )
        self._display.close()
        files = {name: str(directory / name) for name in _FILES if (directory / name).exists()}
        self._display.event("summary", _text(summary, files), **summary, files=files)
        rows = summary["rows"]
        completed = status.state == "completed" and (rows["completed"] > 0 or rows["committed"] == 0)
        return OK if completed else FAILED


def _text(summary: dict[str, Any], files: dict[str, str]) -> str:
    rows, tokens = summary["rows"], summary["tokens"]
    lines = [
        f"run {summary['run_id']} {summary['state']}"
        + (f" ({summary['reason']})" if summary.get("reason") else "")
        + f": {rows['completed']} of {rows['total']} rows completed in {summary['durations']['wall_s']:.1f} s, "
        f"{summary['rows_per_s']:.1f} rows/s, {summary['tokens_per_s']:.0f} tokens/s "
        f"({tokens['prompt']} + {tokens['completion']} tokens)",
    ]
    if rows["failed"]:
        lines.append(f"warning: {rows['failed']} rows failed for good; why is in {files.get('errors.jsonl', '')}")
    if summary["attempts"]["worker_lost"]:
        lines.append(f"{summary['attempts']['worker_lost']} attempts were lost with their worker and repeated")
    lines.append("files: " + ", ".join(files.values()))
    return "\n".join(lines)
