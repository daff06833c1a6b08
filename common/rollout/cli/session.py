"""One invocation of a workload's command, from its settings to its files.

Common to all workloads: a named cluster, or one on this machine for as long as the command runs; resume; concurrent
submission and collection; progress; interrupts; exit codes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout.cli.asking import once
from rollout.cli.boundary import INTERRUPTED, OK
from rollout.cli.bucket_place import in_bucket
from rollout.cli.checking import noted
from rollout.cli.collecting import CollectedRun
from rollout.cli.command_cluster import CommandCluster
from rollout.cli.complete_run import complete
from rollout.cli.dry_run import dry_run
from rollout.cli.followed_input import FollowedInput
from rollout.cli.input_check import slowly
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.interrupted import interrupted, interrupted_early
from rollout.cli.meant_run import MeantRun
from rollout.cli.named_snapshots import NamedSnapshots
from rollout.cli.options import chosen
from rollout.cli.progress import Display, display_for
from rollout.cli.resumed_run import ResumedRun, carry
from rollout.cli.run_place import place, target_of, why_gone
from rollout.cli.run_rows import InputRows, publisher_of, rows_of
from rollout.cli.shown_output import ShownOutput
from rollout.cli.streams import keep_going
from rollout.cli.words import counted, of_unit
from rollout.cli.work import FIRST_PATIENCE_S, PATIENCE_S, Work
from rollout.cli.work_options import Options
from rollout.client.intake_queues import Queues, opened
from rollout.client.private import state_of
from rollout.client.publish import published
from rollout.client.run_session import unless
from rollout.client.runs import Runs, new_ulid
from rollout.client.snapshots import keep_names
from rollout.client.trees import name_trees, upload_trees
from rollout.model.errors import ConfigError
from rollout.model.ids import short
from rollout.wire import event_loop
from rollout.workloads.arriving_rows import queued_input
from rollout.workloads.collector import Collector
from rollout.workloads.following import NoRowsYetError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Checked, Workload
from rollout.workloads.resume import (
    before_rows_were_added,
    compare,
    finished,
    limit_grew,
    open_collector,
    resumed_config,
    rows_added,
)

T = TypeVar("T")


def run_workload(
    workload: Workload[Any, Any], settings: BaseModel, options: Options, display: Display | None = None
) -> int:
    """Run a workload and return the exit code. `display` replaces the one for standard output.

    Raises ConfigError and InputError, with all faults, before anything is started or written.
    """
    name = options.name or getattr(getattr(settings, "run", None), "name", "")
    if name.startswith("@"):
        raise ConfigError(f"--name: {name!r} begins with @, which stands for other things: choose another")
    target = target_of(options)
    if not target.addresses:
        workload.works_here()
    if options.dry_run:
        return dry_run(workload, settings, options, [] if target.addresses else workload.host_notes(settings))
    target = place(Path(workload.directory(settings)), target, options)
    display = display or display_for(json=options.json)
    work = Work(workload, settings, options, target, display)
    _refuse_what_does_not_go_together(work)
    if target.private is not None:
        workload.check_host(settings)
    keep_going(f"the run goes on, its results are in {work.results}, and the command will end with 1")
    for note in workload.host_notes(settings) if target.private is not None else ():
        display.note(noted(note))
    try:
        return event_loop.run(Invocation(work).run())
    finally:
        display.close()


def _refuse_what_does_not_go_together(work: Work) -> None:
    rows = queued_input(work.settings)
    if work.followed is not None and work.workload.bucket(work.settings) is not None:
        raise ConfigError("--follow: the output is in a bucket: name a directory")
    if not work.options.detach:
        return
    if rows is not None and rows.follow:
        raise ConfigError("--detach: the input is followed by this command, for as long as it runs: leave one out")
    if work.is_private:
        raise ConfigError("--detach needs a cluster that stays: name it with --coordinator HOST:PORT")
    if rows is not None and rows.queue:
        raise ConfigError("--detach: rows that arrive from a queue are taken by this command, for as long as it runs")


class Invocation:
    """State of the invocation, kept for the message if it is interrupted."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._workload, self._settings, self._options = work.workload, work.settings, work.options
        self._target, self._display = work.target, work.display
        self._note = once(work.display.note)
        self._cluster = CommandCluster(work)
        output, rows = work.directory.expanduser(), work.followed
        self._snapshots = NamedSnapshots(work.workload, work.target, output, work.display.note, work.display.step)
        self._followed = FollowedInput(rows, output, work.display) if rows is not None else None
        self._place = OutputPlace(work.directory)
        self._run: CollectedRun | None = None
        self._name = ""
        self._known = ""
        self._began = self._prepared_s = 0.0  # the look at the directory, and how long it took until its run went on
        self._extends = False  # rows that were added to the input wait for the end of the run that they follow
        self._is_told = False  # which cluster it is, and what was found of the input

    # ---- from beginning to end

    async def run(self) -> int:
        """Run and return the exit code."""
        interrupts = Interrupts(self._at_once, self._end_gently)
        interrupts.install()
        try:
            return await interrupts.guard(self._with_directory())
        except Interrupted:
            self._say_interrupted()
            return INTERRUPTED

    async def _with_directory(self) -> int:
        workload, command = self._workload, self._options.command()
        with OutputDirectory.open(self._work.directory, command, key=workload.directory_key) as self._output:
            self._place = OutputPlace(self._output.path)
            published_to = in_bucket(self._work, self._output, self._note)
            async with published_to as self._place, self._cluster.prepared(self._is_complete):
                return await (self._go() if self._followed is None else self._follow_input(self._followed))

    async def _follow_input(self, followed: FollowedInput) -> int:
        """Run what is there, and another run for what came meanwhile, until told to end, an idle time passes, or a run
        fails."""
        code = OK
        while await followed.goes_on():
            before = self._run
            with suppress(NoRowsYetError):
                code = await self._go()
            if self._run is not None and self._run is not before:
                followed.ran(self._prepared_s)
                if not self._is_complete():
                    return code
        return code

    async def _go(self) -> int:
        """Run once, and once more for rows added to the input that wait for the end of the first."""
        self._extends = False
        code = await self._in_directory()
        if self._extends and self._is_complete():
            self._run = None
            code = await self._in_directory()
        return code

    async def _in_directory(self) -> int:
        """Decide what to do with the output directory's run, and do it."""
        self._began = asyncio.get_running_loop().time()
        known, checked = await MeantRun(self._work, self._output).find()
        self._known = known or ""
        try:
            self._tell_found(checked)
            stored = await self._complete_config(known, checked)
            if known is None or stored is None:
                self._refuse_retry(known)
                return await self._start(known, None, checked)
            return await self._go_on(known, stored, checked)
        finally:
            checked.close()

    def _tell_found(self, checked: Checked) -> None:
        if self._is_told:
            return  # of an input that is followed, files say the rest
        self._is_told = True
        if self._work.is_private:
            self._cluster.tell()  # else when it has answered
        for note in (*(checked.source.notes if checked.source else ()), *checked.notes):
            self._note(noted(note))

    def _is_complete(self) -> bool:
        return self._run is not None and self._run.completed

    @property
    def _is_ending(self) -> bool:
        """Whether no further row of a followed input is accepted."""
        return self._followed is not None and self._followed.ending

    # ---- which way to go on

    async def _complete_config(self, known: str | None, checked: Checked) -> JsonObject | None:
        """Return the configuration of the directory's run if it is known, and complete that of `checked`, which depends
        on it and on other runs. Raises ConfigError and NotFoundError."""
        stored = self._output.stored_config
        await name_trees(checked.config, [one for one in checked.trees if one.always], self._display.step)
        if known is None:
            await self._snapshots.find(checked, checked.snapshots)
        elif stored is not None:
            new = keep_names(stored, checked.config, checked.snapshots)
            await self._snapshots.find(checked, new if checked.follows else ())
            await carry(self._output, stored, checked)
        return stored

    async def _go_on(self, known: str, stored: JsonObject, checked: Checked) -> int:
        """Resume the directory's run, follow it with another, or finish its files if it is complete."""
        workload, output, options = self._workload, self._output, self._options
        kept: list[str] = []
        if not checked.follows:
            added = await asyncio.to_thread(rows_added, workload, output, stored, checked)
            if added and (options.extend or self._followed is not None or limit_grew(stored, checked.config)):
                return await self._extend(known, stored, checked, added)
            hint = "; --extend runs only the rows that were added" if added else ""
            kept = await asyncio.to_thread(compare, workload, output, stored, checked, hint)
        summary = await self._finished(known, stored, checked)
        if options.retry is not None:
            self._retry(known, checked, summary)
        if checked.follows:
            return await self._replace(known, stored, checked, summary)
        if summary is not None and self._followed is not None and self._followed.turn > 1:
            return OK  # who follows it knows
        for one in kept:
            self._note(f"note: {one}")
        if summary is not None:
            return await self._complete(known, resumed_config(workload, stored, checked.config), summary)
        return await self._start(known, stored, checked)

    async def _extend(self, known: str, stored: JsonObject, checked: Checked, added: int) -> int:
        """Run the rows that were added to the input: at once if the run before is complete, else after it."""
        before = before_rows_were_added(self._workload, stored, checked)
        await asyncio.to_thread(compare, self._workload, self._output, stored, before)
        summary = await self._finished(known, stored, before)
        rows = counted(added, "row")
        if summary is not None:
            if self._is_ending:
                return OK
            checked.follows = f"{rows} {'was' if added == 1 else 'were'} added"
            return await self._replace(known, stored, checked, summary)
        if self._options.detach:
            raise ConfigError(f"--detach: run {short(known)} is not complete: extend it without --detach")
        self._display.note(f"run {short(known)} goes on first: the {rows} that were added run when it is complete")
        self._extends = True
        return await self._start(known, stored, before)

    async def _finished(self, known: str, stored: JsonObject, checked: Checked) -> JsonObject | None:
        """Return the summary of the run if it is complete, including what it sends to a queue."""
        summary = await asyncio.to_thread(finished, self._workload, self._output, known, stored, checked)
        if summary is None or checked.queue is None or not checked.queue.cloud.outlet:
            return summary
        is_sent = published(self._output.path, known) >= summary[self._workload.unit]["committed"]
        return summary if is_sent else None

    def _refuse_retry(self, known: str | None) -> None:
        """Raise ConfigError if rows of a run that is not here are to be retried."""
        if self._options.retry is None:
            return
        where = self._work.results
        if known is not None and self._workload.bucket(self._settings) is not None:
            raise ConfigError(
                f"{where}: the files of run {short(known)} are not on this machine: run its failed rows again where it "
                "was started, or collect them here first, with `rollout infer batch` and its configuration"
            )
        raise ConfigError(f"{where} holds no run whose failed rows could run again")

    def _retry(self, known: str, checked: Checked, summary: JsonObject | None) -> None:
        if summary is not None:
            checked.follows, checked.retry = "failed rows run again", self._options.retry
        elif checked.carried is None:
            raise ConfigError(
                f"run {short(known)} is not complete: go on with it (`rollout infer batch`), then run its failed rows "
                "again"
            )

    async def _complete(self, known: str, config: JsonObject, summary: JsonObject) -> int:
        await complete(self._work, self._place, self._note, known, config, summary)
        return OK

    # ---- a run that another one follows

    async def _replace(self, known: str, stored: JsonObject, checked: Checked, summary: JsonObject | None) -> int:
        """Replace `known` by another run in its directory, once all its results are in the files.

        `summary` is that of a run that is over and completely in the files.
        """
        config = resumed_config(self._workload, stored, checked.config)
        if summary is not None:
            why, told = checked.follows, await self._plan_followup(checked, stored)
            if not checked.follows:
                self._display.note(f"note: {told}")
                return await self._complete(known, config, summary)
            self._display.note(f"run {short(known)} is over, and {why}: {told}")
        async with self._reached(PATIENCE_S, checked) as runs:
            if summary is None:
                self._display.note(f"run {short(known)} goes no further, since {checked.follows}")
                await self._unless_failed(self._end(runs, known, config, checked))
                self._display.note(await self._plan_followup(checked, stored))
            run_id = new_ulid()
            self._known, self._name = run_id, self._new_name(checked.config)
            await self._name_local_trees(checked)
            self._output.hand_over(run_id, checked.config, checked.keep)
            if checked.source is not None:
                await asyncio.to_thread(checked.source.keep)
            await self._place.claim()
            return await self._carry_out(runs, run_id, checked.config, checked, resumed=False)

    async def _plan_followup(self, checked: Checked, stored: JsonObject) -> str:
        tell = slowly(self._display.step)
        return await asyncio.to_thread(self._workload.plan_followup, checked, stored, self._output.path, tell)

    async def _end(self, runs: Runs, run_id: str, config: JsonObject, checked: Checked) -> None:
        """Finish what runs, start nothing more, and write all results to the files."""
        collector = await self._collector(run_id, config, checked)
        rows = InputRows(self._workload, checked, config)
        run = CollectedRun(self._workload, runs, run_id, config, rows, collector, self._display, self._place)
        try:
            if not await run.end() and collector.faults:
                raise ConfigError(
                    "\n".join([why_gone(self._output.path, run_id, self._cluster), *collector.faults])
                    + "\nTo start a new run, name another output directory"
                )
        finally:
            await asyncio.shield(asyncio.to_thread(run.close))

    # ---- a run that begins, or goes on

    async def _start(self, known: str | None, stored: JsonObject | None, checked: Checked) -> int:
        if known is None and self._is_ending:
            return OK
        async with opened(checked.queue) if checked.queue is not None else nullcontext() as queues:
            for note in queues.notes() if queues is not None else ():
                self._display.note(noted(note))
            if known is not None and self._work.is_private and state_of(self._output.path) is None:
                # Before a ledger is made that has never known it.
                await self._resumed(known, stored).refuse_to_lose(checked)
            async with self._reached(PATIENCE_S if known else FIRST_PATIENCE_S, checked) as runs:
                run_id = known or new_ulid()
                config = await self._unless_failed(self._agreed(runs, run_id, stored, checked, new=known is None))
                return await self._carry_out(runs, run_id, config, checked, resumed=known is not None, queues=queues)

    async def _agreed(
        self, runs: Runs, run_id: str, stored: JsonObject | None, checked: Checked, *, new: bool
    ) -> JsonObject:
        """Return the configuration that the run resumes or starts with, and claim the directory for the run."""
        agreed = None if new else await self._resumed(run_id, stored).agree(runs, checked)
        config, self._name = agreed or (checked.config, self._new_name(checked.config))
        if agreed is None:
            await self._name_local_trees(checked)
        if checked.source is not None:
            await asyncio.to_thread(checked.source.verify_objects)  # before the directory is the run's
        moved = self._output.claim(run_id, config, self._workload.result_files, checked.keep)
        if moved:
            self._note(f"note: what {self._output.path} held was not this run's; it is now {', '.join(moved)}")
        await self._place.claim()
        if checked.source is not None and not checked.partly:
            await asyncio.to_thread(checked.source.keep)
        return config

    def _resumed(self, run_id: str, stored: JsonObject | None) -> ResumedRun:
        return ResumedRun(self._work, self._output, self._cluster, self._note, run_id, stored)

    async def _carry_out(
        self,
        runs: Runs,
        run_id: str,
        config: JsonObject,
        checked: Checked,
        *,
        resumed: bool,
        queues: Queues | None = None,
    ) -> int:
        collector = await self._collector(run_id, config, checked)
        for fault in collector.faults:
            self._display.note(f"note: {fault}; what it should hold is written anew from the ledger")
        shown = ShownOutput(runs, run_id, self._display) if self._options.show_output else None
        publisher = publisher_of(self._work, self._place, config, queues, runs, run_id)
        run = self._run = CollectedRun(
            self._workload,
            runs,
            run_id,
            config,
            rows_of(self._work, self._place, checked, config, queues, runs, run_id),
            collector,
            self._display,
            self._place,
            name=self._name,
            beside=[one for one in (shown, publisher) if one is not None],
            failure=self._cluster.failure,
        )
        self._prepared_s = asyncio.get_running_loop().time() - self._began
        try:
            named = chosen().go_on or self._options.resume is not None
            opening = run.open(resumed=resumed, go_on=named, command=self._command(resume=short(run_id)))
            status = await self._unless_failed(opening)
            if shown is not None and resumed:
                await shown.skip()
            await run.remember(self._target, self._output.path, self._name)
            runs.patience_s = PATIENCE_S
            # A run whose every unit is in the ledger may still lack a tree: an earlier command was cut off.
            if status.state == "running":
                await self._unless_failed(self._snapshots.provide(run, config, checked.snapshots))
                await self._unless_failed(upload_trees(runs, run_id, config, checked.trees, self._display.step))
            return await run.carry_out(detach=self._command() if self._options.detach else "")
        finally:
            await asyncio.shield(asyncio.to_thread(run.close))

    def _new_name(self, config: JsonObject) -> str:
        return self._options.name or config.get("run", {}).get("name", "") or self._output.path.resolve().name

    async def _name_local_trees(self, checked: Checked) -> None:
        """Name trees that a private cluster reads in place."""
        if not self._work.is_private:
            local = [one for one in checked.trees if not one.always]
            await name_trees(checked.config, local, self._display.step)

    async def _collector(self, run_id: str, config: JsonObject, checked: Checked) -> Collector:
        return await asyncio.to_thread(open_collector, self._workload, self._output, run_id, config, checked.total)

    def _reached(self, patience_s: float, checked: Checked) -> AbstractAsyncContextManager[Runs]:
        own = self._cluster.is_own
        return self._cluster.reached(PATIENCE_S if own else patience_s, self._options.command(), checked.slots)

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` unless the cluster fails. Used before results are collected, which checks for that itself."""
        return await unless(work, self._cluster.failure)

    # ---- interruption

    def _command(self, *, resume: str = "") -> str:
        return self._options.command(self._cluster.addresses, resume=resume)

    def _end_gently(self) -> bool:
        """Handle the first Ctrl-C. Returns True if what has begun is finished before the command ends."""
        run = self._run
        if self._followed is None:
            return run is not None and run.finish_running()
        self._followed.end()
        if run is not None and not run.completed:
            unit, left = self._workload.unit, run.total - run.committed
            self._display.event(
                "draining",
                f"no further {unit} are taken, and the {of_unit(left, unit)} without a result are finished. Ctrl-C "
                "once more leaves at once: the same command goes on with them",
                unfinished=left,
            )
        return True

    def _at_once(self) -> None:
        """Handle the second Ctrl-C."""
        self._cluster.kill()
        self._say_interrupted()

    def _say_interrupted(self) -> None:
        self._display.close()
        run, command = self._run, self._command()
        if run is None:
            lines, run_id, committed = interrupted_early(self._known, self._place, command), self._known, 0
        else:
            lines = interrupted(run, self._work, self._place, command)
            run_id, committed = run.run_id, run.committed
        self._display.event("interrupted", "\n".join(lines), run_id=run_id, committed=committed, command=command)
