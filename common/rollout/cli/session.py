"""One invocation of a workload's command, from its settings to its files.

The same for every workload: a cluster that is named, or one on this machine for as long as the command runs; resume;
submitting and collecting at the same time; progress; interrupts; exit codes; the dry run.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rollout.cli.asking import once, reached
from rollout.cli.boundary import INTERRUPTED, OK
from rollout.cli.checking import noted, verdict
from rollout.cli.collecting import CollectedRun
from rollout.cli.command_cluster import CommandCluster
from rollout.cli.interrupt import Interrupted, Interrupts
from rollout.cli.named_snapshots import NamedSnapshots
from rollout.cli.options import chosen
from rollout.cli.progress import Display, display_for
from rollout.cli.references import means, resolve_run
from rollout.cli.run_rows import InputRows, QueueRows
from rollout.cli.shown_output import ShownOutput
from rollout.cli.streams import keep_going
from rollout.cli.words import counted, of_unit, unsuccessful
from rollout.client.intake import Intake
from rollout.client.intake_queues import Queues, opened
from rollout.client.origin import authority_of, origin_of
from rollout.client.private import (
    STATE_DIR,
    known_private_runs,
    state_of,
)
from rollout.client.publish import Publisher, published
from rollout.client.run_session import unless
from rollout.client.runs import Runs, new_ulid
from rollout.client.snapshots import keep_names
from rollout.client.target import ClusterSelector, Target, find_target, private_target
from rollout.client.trees import name_trees, upload_trees
from rollout.model.errors import ConfigError, InputError, NotFoundError, OtherRunError
from rollout.model.ids import is_ulid, short
from rollout.wire import event_loop
from rollout.workloads.carrying import CARRIED, Carried
from rollout.workloads.collector import Collector
from rollout.workloads.following import FOLLOWED, NoRowsYetError, Parts, Seen, form_of, seen
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.output import RUN_ID, OutputDirectory, claimed
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Checked, InputReader, Workload, cloud_of, followed_input
from rollout.workloads.publishing import BucketOutput
from rollout.workloads.resume import (
    all_changes,
    changed_limits,
    collected,
    compare,
    failed_without_results,
    finished,
    limit_grew,
    open_collector,
    resumed_config,
    with_limits,
)
from rollout.workloads.sections import QueuedInput

T = TypeVar("T")

_PATIENCE_S = 900.0  # a run outlives a coordinator that is being repaired
_FIRST_PATIENCE_S = 20.0  # but an address that never answered a new run is probably wrong
_TELL_EVERY_S = 2.0
FOLLOW_EVERY_S = 1.0
"""Between two looks at the files of an input that is followed."""
_NOTHING_SENT = "interrupted before anything was submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What every workload's command takes. `words`: the command as it was typed, without these: `rollout infer batch
    --config FILE`. `local`: on this machine alone, whatever cluster is named. `extend`: rows that were added to the
    input of a complete run are run. `retry`: as in `carry_over`, of the complete run in the output directory.
    `show_output`: what the run's processes print is shown as it comes."""

    words: tuple[str, ...]
    name: str = ""
    coordinators: tuple[str, ...] = ()
    tls_dir: Path | None = None
    resume: str | None = None
    workers: int | None = None
    dry_run: bool = False
    detach: bool = False
    json: bool = False
    local: bool = False
    extend: bool = False
    retry: frozenset[str] | None = None
    show_output: bool = False

    def command(self, known: Sequence[str] = (), *, resume: str = "") -> str:
        """What to type to go on; `known`: every coordinator, of which the one that was named may be down by then.
        `resume`: the run, where it has to be named."""
        words = list(self.words)
        for address in known or self.coordinators:
            words += ["--coordinator", address] if self.coordinators else []
        selector = chosen().selector
        words += ["--context", selector.context] if selector.context else []
        words += ["--local"] if selector.local else []
        words += ["--extend"] if self.extend else []
        if self.tls_dir is not None:
            words += ["--tls-dir", str(self.tls_dir)]
        if self.workers is not None:
            words += ["--workers", str(self.workers)]
        if resume:
            words += ["--continue"] if "--resume" in words else ["--resume", resume]
        return shlex.join(words)


def run_workload(
    workload: Workload[Any, Any], settings: BaseModel, options: Options, display: Display | None = None
) -> int:
    """The exit code. ConfigError and InputError, with all faults, before anything is started or written.

    `display`: in place of the one for standard output."""
    name = options.name or getattr(getattr(settings, "run", None), "name", "")
    if name.startswith("@"):
        raise ConfigError(f"--name: {name!r} begins with @, which stands for other things: choose another")
    target = target_of(options)
    if not target.addresses:
        workload.works_here()
    if options.dry_run:
        return dry_run(workload, settings, options, [] if target.addresses else workload.host_notes(settings))
    target = place(Path(workload.directory(settings)), target, options)
    if options.detach and followed_input(settings) is not None:
        raise ConfigError("--detach: the input is followed by this command, for as long as it runs: leave one out")
    if target.private is not None:
        if options.detach:
            raise ConfigError("--detach needs a cluster that stays: name it with --coordinator HOST:PORT")
        workload.check_host(settings)
    keep_going(f"the run goes on, its results are in {_place(workload, settings)}, and the command will end with 1")
    display = display or display_for(json=options.json)
    for note in workload.host_notes(settings) if target.private is not None else ():
        display.note(noted(note))
    invocation = _Invocation(workload, settings, options, target, display)
    try:
        code = event_loop.run(invocation.run())
        if code == OK and invocation.extends_now:
            invocation = _Invocation(workload, settings, options, target, display)
            code = event_loop.run(invocation.run())
        return code
    finally:
        display.close()


def target_of(options: Options) -> Target:
    selector = ClusterSelector(local=True) if options.local else chosen().selector
    return find_target(list(options.coordinators), options.tls_dir, selector)


def _place(workload: Workload[Any, Any], settings: BaseModel) -> str:
    """Of the results, for people."""
    return str(workload.bucket(settings) or workload.directory(settings))


def dry_run(workload: Workload[Any, Any], settings: BaseModel, options: Options, of_host: list[str]) -> int:
    display = display_for(json=options.json)
    found = verdict(workload, settings, lambda text: display.step(text) if text else None)
    for note in (*found.notes, *map(noted, of_host)):
        display.note(note)
    fields = found.fields
    find_named_now(workload, settings, found.checked, options, display.note)
    plain = {key: value for key, value in fields.items() if isinstance(value, str | int | float)}
    inputs = "" if workload.endless else "rows" if "rows" in plain else workload.unit
    said = " ".join(f"{'inputs' if key == inputs else key}={value}" for key, value in plain.items())
    lines = [*found.plan, f"dry-run OK: {said}"]
    display.event("dry_run", "\n".join(lines), **fields, plan=found.plan)
    return OK


def find_named_now(
    workload: Workload[Any, Any], settings: BaseModel, checked: Checked, options: Options, note: Callable[[str], None]
) -> None:
    """ConfigError, NotFoundError: what the configuration names of other runs is not there, or of no use. Nothing is
    looked for where a run goes on, with what it began with. Blocking."""
    output = workload.directory(settings).expanduser()
    if not checked.snapshots or claimed(output) is not None:
        return
    target = target_of(options)
    target = target if target.addresses else private_target(output / STATE_DIR, target.why)
    asyncio.run(NamedSnapshots(workload, target, output, note).find(checked, checked.snapshots))


def place(output: Path, target: Target, options: Options) -> Target:
    """Where the run of `output` is, or goes: a private cluster below it where nothing names another. ConfigError with
    the command that goes on when the run is on another cluster than `target`."""
    state = output.expanduser() / STATE_DIR
    run_id = _run_id(output.expanduser())
    origin = origin_of(output.expanduser(), run_id)
    if origin is not None:
        here = authority_of(target.tls_dir) if target.addresses else ""
        if origin.authority and here != origin.authority:
            goes, seen = f"{target}" if target.addresses else "a private cluster", short(run_id or "")
            raise ConfigError(
                f"run {seen} of {output} was started on {origin}, and this command would go to {goes}. Go on "
                f"with: {shlex.join(options.words)} {origin.options()}\n  or name another output directory to start "
                "a new run"
            )
        return target
    if not target.addresses:
        return private_target(state, target.why)
    if run_id is None or state_of(output.expanduser()) is None:
        return target
    if target.by == "option":
        raise ConfigError(
            f"run {short(run_id)} of {output} was started on this machine, by the private cluster in {state}. Go on "
            f"without a cluster: {shlex.join([*options.words, '--local'])}\n  or name another output directory to "
            "start a new run"
        )
    return private_target(state, "the output directory")


def _run_id(output: Path) -> str | None:
    with suppress(OSError, ValueError):
        return (output / RUN_ID).read_text("ascii").strip() or None
    return None


class _Invocation:
    """What it learns on the way is kept here, for the message when it is interrupted."""

    def __init__(
        self,
        workload: Workload[Any, Any],
        settings: BaseModel,
        options: Options,
        target: Target,
        display: Display,
    ) -> None:
        self._workload = workload
        self._settings = settings
        self._options = options
        self._target = target
        self._display = display
        self._note = once(display.note)
        self._cluster = CommandCluster(target, workload, settings, display, workers=options.workers)
        self._snapshots = NamedSnapshots(
            workload, target, workload.directory(settings).expanduser(), display.note, display.step
        )
        self._run: CollectedRun | None = None
        self._name = ""
        self._known = ""
        self._queues: Queues | None = None
        self._place = OutputPlace(workload.directory(settings))
        self._followed = followed_input(settings) if options.retry is None else None
        self._told_to_end = asyncio.Event()
        self._began_at = 0.0
        self._rounds = 0
        self.extends_now = False
        """The run is complete that the rows which were added to its input follow: another invocation runs them."""

    async def run(self) -> int:
        interrupts = Interrupts(self._at_once, self._end_gently)
        interrupts.install()
        try:
            return await interrupts.guard(self._work())
        except Interrupted:
            self._say_interrupted()
            return INTERRUPTED

    async def _work(self) -> int:
        directory = self._workload.directory(self._settings)
        with OutputDirectory.open(directory, self._options.command(), key=self._workload.directory_key) as self._output:
            async with self._published(), self._cluster.prepared(self._is_complete):
                if self._followed is not None:
                    return await self._follow_input(self._followed)
                return await self._in_directory()

    async def _follow_input(self, rows: QueuedInput) -> int:
        """A run for what is there, and one more for what has come meanwhile, until it is told to end, nothing came for
        long, or a run fails."""
        loop = asyncio.get_running_loop()
        code, came = OK, loop.time()
        files = ", ".join(rows.patterns)
        while not self._told_to_end.is_set():
            began, before, there = loop.time(), self._run, await self._seen(rows)
            with suppress(NoRowsYetError):
                code = await self._in_directory()
            self._rounds += 1
            if self._run is not None and self._run is not before:
                came = loop.time()
                if not self._run.completed:
                    return code
            if self.extends_now:
                self.extends_now = False
                continue
            if not self._told_to_end.is_set() and (self._run is not before or self._rounds == 1):
                self._display.event("following", f"waiting for more rows in {files}; Ctrl-C ends it", files=files)
            # So that most of the time is left for the rows.
            pause_s = max(FOLLOW_EVERY_S, 2 * (max(self._began_at, began) - began or loop.time() - began))
            if 0 < rows.stop_when_empty_s <= loop.time() - came and not self._told_to_end.is_set():
                break  # also where files change, and no row comes
            if not await self._more_came(rows, there, pause_s, came):
                break
        why = "it was told to" if self._told_to_end.is_set() else f"nothing has come for {rows.stop_when_empty_s:g} s"
        self._display.event("followed", f"the command ends, since {why}; given again, it goes on with what comes")
        return code

    async def _seen(self, rows: QueuedInput) -> Seen:
        return await asyncio.to_thread(seen, rows.patterns, form_of(rows), self._output.path)

    async def _more_came(self, rows: QueuedInput, there: Seen, pause_s: float, came: float) -> bool:
        """When the files are others than `there`; False: the command is to end."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._told_to_end.wait()
            if self._told_to_end.is_set():
                return False
            if await self._seen(rows) != there:
                return True
            if 0 < rows.stop_when_empty_s <= loop.time() - came:
                return False
            pause_s = FOLLOW_EVERY_S

    def _end_gently(self) -> bool:
        run = self._run
        if self._followed is None:
            return run is not None and run.finish_running()
        self._told_to_end.set()
        if run is not None and not run.completed:
            unit, left = self._workload.unit, run.total - run.committed
            self._display.event(
                "draining",
                f"no further {unit} are taken, and the {of_unit(left, unit)} without a result are finished. Ctrl-C "
                "once more leaves at once: the same command goes on with them",
                unfinished=left,
            )
        return True

    def _is_complete(self) -> bool:
        return self._run is not None and self._run.completed

    @asynccontextmanager
    async def _published(self) -> AsyncGenerator[None]:
        """The output's place in a bucket is this command's, if that is where it is."""
        url = self._workload.bucket(self._settings)
        self._place = OutputPlace(self._output.path)
        if url is None:
            yield
            return
        remote = BucketOutput(
            url,
            self._output.path,
            cloud_of(self._settings),
            self._workload.result_files,
            command=self._options.command(),
            tell=self._display.step,
            note=self._note,
        )
        self._display.note(f"results are collected in {self._output.path}, and uploaded to {url} from there")
        try:
            await remote.open(resume=self._options.resume is not None, private=self._target.private is not None)
            self._place = remote
            yield
        finally:
            await asyncio.shield(remote.close())

    async def _in_directory(self) -> int:
        known = self._output.check(await self._resume())
        replaced = known if self._options.resume is None else None  # which names the one that goes on
        without_results = replaced is not None and failed_without_results(self._workload, self._output, replaced)
        try:
            checked = await self._check(resumed=known is not None, without_results=without_results)
            if without_results:
                self._make_way(self._output.stored_config, checked)
        except OtherRunError as error:
            if known is None or self._options.resume is not None:
                raise
            ended = f"run {short(known)} failed before any of the {self._workload.unit} had a result"
            self._display.note(f"note: {ended}, and {error.message}: this is another run")
            self._output.leave()
            known = None
            checked = await self._check(resumed=True)  # its input may be at hand in a copy only
        self._known = known or ""
        try:
            return await self._go_on(known, checked)
        finally:
            checked.close()

    def _make_way(self, stored: JsonObject | None, checked: Checked) -> None:
        """For a run that failed before any unit had a result: OtherRunError where it was made with something else."""
        special = self._options.retry is not None or self._followed is not None
        if not self._workload.makes_way or stored is None or stored.get(CARRIED) or special:
            return
        if changes := all_changes(self._workload, stored, checked.config):
            checked.close()
            raise OtherRunError(f"what it was made with has changed since ({changes})", changes=changes)

    async def _resume(self) -> str | None:
        """The id of the run that --resume names; what is not all of one, the directory or the cluster knows."""
        text = self._options.resume
        if text is None or is_ulid(text.upper()):
            return text and text.upper()
        own = self._output.run_id
        if text and own is not None and means(own, text):
            return own
        if self._target.private is not None and state_of(self._output.path) is None:
            raise ConfigError(
                f"--resume {text}: no private cluster has run in {self._output.path} that knows such a run: name the "
                "cluster of the run (--coordinator, --context), or give the whole id"
            )
        async with reached(self._target, self._display.note, patience_s=_FIRST_PATIENCE_S) as (runs, _):
            return await resolve_run(runs, text)

    async def _go_on(self, known: str | None, checked: Checked) -> int:
        workload = self._workload
        await name_trees(checked.config, [one for one in checked.trees if one.always], self._display.step)
        stored = self._output.stored_config
        if known is None:
            await self._snapshots.find(checked, checked.snapshots)
        elif stored is not None:
            new = keep_names(stored, checked.config, checked.snapshots)
            await self._snapshots.find(checked, new if checked.follows else ())
        if stored is not None and stored.get(CARRIED):
            checked.carry(await asyncio.to_thread(Carried.read, self._output.path, stored[CARRIED]))
        self._refuse_retry(known, stored)
        if stored is not None:
            added = 0 if checked.follows else await self._added(stored, checked)
            wanted = self._options.extend or self._followed is not None or limit_grew(stored, checked.config)
            extend = added > 0 and wanted
            kept: list[str] = []
            if not checked.follows:
                hint = "; --extend runs only the rows that were added" if added else ""
                kept = await self._compared(stored, self._before(checked, stored) if extend else checked, hint)
            if extend:
                return await self._extend(known, stored, checked, added)
            if known is not None:
                summary = await asyncio.to_thread(finished, workload, self._output, known, stored, checked)
                if summary is not None and self._owes_results(known, summary, checked):
                    summary = None
                if self._options.retry is not None:
                    self._retry(checked, known, summary)
                if checked.follows:
                    return await self._follow(known, stored, checked, summary)
                if summary is not None and self._rounds:
                    return OK  # whoever follows knows
                self._tell_kept(kept)
                if summary is not None:
                    return await self._complete(known, resumed_config(workload, stored, checked.config), summary)
        if checked.queue is not None and self._options.detach:
            raise ConfigError(
                "--detach: rows that arrive from a queue are taken by this command, for as long as it runs"
            )
        if known is None and self._told_to_end.is_set():
            return OK
        async with opened(checked.queue) if checked.queue is not None else nullcontext() as self._queues:
            for note in self._queues.notes() if self._queues is not None else ():
                self._display.note(noted(note))
            return await self._start(known, stored, checked)

    async def _start(self, known: str | None, stored: JsonObject | None, checked: Checked) -> int:
        patience_s = _PATIENCE_S if known else _FIRST_PATIENCE_S
        if known is not None and self._target.private is not None and state_of(self._output.path) is None:
            await self._refuse_to_lose(known, stored, checked)  # before a ledger is made that has never known it
        async with self._reached(patience_s, checked) as runs:
            run_id = known or new_ulid()
            config = await self._unless_failed(self._agree(runs, run_id, stored, checked, new=known is None))
            return await self._carry_out(runs, run_id, config, checked, resumed=known is not None)

    def _refuse_retry(self, known: str | None, stored: JsonObject | None) -> None:
        bucket = self._workload.bucket(self._settings)
        if self._followed is not None and bucket is not None:
            raise ConfigError("--follow: the output is in a bucket: name a directory")
        if self._options.retry is None or (known is not None and stored is not None):
            return
        place = _place(self._workload, self._settings)
        if known is not None and bucket is not None:
            raise ConfigError(
                f"{place}: the files of run {short(known)} are not on this machine: run its failed rows again where it "
                "was started, or collect them here first, with `rollout infer batch` and its configuration"
            )
        raise ConfigError(f"{place} holds no run whose failed rows could run again")

    async def _added(self, stored: JsonObject, checked: Checked) -> int:
        """Rows that were added to the input, where that is all that changed of it and they could run by themselves."""
        before, source = lookup(stored, "input.digest"), checked.source
        if source is None or not self._workload.carries:
            return 0
        if before == lookup(checked.config, "input.digest"):
            return 0
        return await asyncio.to_thread(source.added, self._output.index_path, before)

    async def _extend(self, known: str | None, stored: JsonObject, checked: Checked, added: int) -> int:
        """Run the rows that were added to the input: at once where the run before is complete, else once it is."""
        before = self._before(checked, stored)
        if known is None:
            return await self._start(known, stored, before)
        summary = await asyncio.to_thread(finished, self._workload, self._output, known, stored, before)
        if summary is None:
            if self._options.detach:
                raise ConfigError(f"--detach: run {short(known)} is not complete: extend it without --detach")
            rows = counted(added, "row")
            self._display.note(f"run {short(known)} goes on first: the {rows} that were added run when it is complete")
            self.extends_now = True
            return await self._start(known, stored, before)
        if self._told_to_end.is_set():
            return OK
        checked.follows = f"{counted(added, 'row')} {'was' if added == 1 else 'were'} added"
        return await self._follow(known, stored, checked, summary)

    def _before(self, checked: Checked, stored: JsonObject) -> Checked:
        """Of the input as it was when the run was made: rows were only added since."""
        total = checked.total if checked.carried is not None else lookup(stored, "input.rows")
        of_input = self._workload.carries
        config = {key: value for key, value in checked.config.items() if key not in of_input}
        config |= {key: stored[key] for key in of_input if key in stored}
        return replace(checked, config=config, total=total, partly=True)

    def _retry(self, checked: Checked, known: str, summary: JsonObject | None) -> None:
        if summary is not None:
            checked.follows, checked.retry = "failed rows run again", self._options.retry
        elif checked.carried is None:
            raise ConfigError(
                f"run {short(known)} is not complete: go on with it (`rollout infer batch`), then run its failed rows "
                "again"
            )

    def _owes_results(self, run_id: str, summary: JsonObject, checked: Checked) -> bool:
        """Whether the output queue of a run that is complete lacks some of its results."""
        if checked.queue is None or not checked.queue.cloud.outlet:
            return False
        return published(self._output.path, run_id) < summary[self._workload.unit]["committed"]

    async def _follow(self, known: str, stored: JsonObject, checked: Checked, summary: JsonObject | None) -> int:
        """Another run takes the place of `known` in its directory, once all that that came to is in the files.
        `summary`: of a run that is over and all of it in the files."""
        workload, seen = self._workload, short(known)
        config = resumed_config(workload, stored, checked.config)

        async def follow() -> str:
            tell = self._slowly()
            return await asyncio.to_thread(workload.plan_followup, checked, stored, self._output.path, tell)

        if summary is not None:
            why, told = checked.follows, await follow()
            if not checked.follows:
                self._display.note(f"note: {told}")
                return await self._complete(known, config, summary)
            self._display.note(f"run {seen} is over, and {why}: {told}")
        async with self._reached(_PATIENCE_S, checked) as runs:
            if summary is None:
                self._display.note(f"run {seen} goes no further, since {checked.follows}")
                await self._unless_failed(self._end(runs, known, config, checked))
                self._display.note(await follow())
            run_id = new_ulid()
            self._known, self._name = run_id, self._options.name or self._output.path.resolve().name
            if self._target.private is None:
                await name_trees(checked.config, [one for one in checked.trees if not one.always], self._display.step)
            self._output.hand_over(run_id, checked.config, checked.keep)
            if checked.source is not None:
                await asyncio.to_thread(checked.source.keep)
            await self._place.claim()
            return await self._carry_out(runs, run_id, checked.config, checked, resumed=False)

    async def _end(self, runs: Runs, run_id: str, config: JsonObject, checked: Checked) -> None:
        """What runs of it is finished, nothing more starts, and all that it came to is in the files."""
        collector = await self._collector(run_id, config, checked)
        rows = InputRows(self._workload, checked, config)
        run = CollectedRun(self._workload, runs, run_id, config, rows, collector, self._display, self._place)
        try:
            if not await run.end() and collector.faults:
                raise ConfigError(
                    "\n".join([self._gone(run_id), *collector.faults])
                    + "\nTo start a new run, name another output directory"
                )
        finally:
            await asyncio.shield(asyncio.to_thread(run.close))

    async def _complete(self, run_id: str, config: JsonObject, summary: JsonObject) -> int:
        """Of a run that was completed and collected. An earlier command may have been ended before all was made that is
        made then, somebody may have deleted it, or it was not wanted: then it is made now."""

        async def fetch(object_id: bytes, path: Path) -> None:
            if self._target.private is not None and state_of(self._output.path) is None:
                raise NotFoundError(f"its private cluster, {self._target.private}, was deleted")
            async with reached(self._target, self._note, patience_s=_PATIENCE_S) as (runs, _):
                await runs.download(run_id, object_id, path)

        made = await self._workload.finished(fetch, config, self._output.path, summary, self._display.note)
        await self._place.publish(summary[self._workload.unit]["committed"])
        files = self._place.files(self._workload.result_files, made)
        also = f"; made now: {', '.join(made)}" if made else ""
        if lookup(config, "input.queue"):
            also += "\nits intake has ended: to take further rows, name another output directory"
        self._display.event("summary", self._complete_text(summary) + also, **summary, files=files)
        return OK

    def _slowly(self) -> Callable[[str], None]:
        """Shows what a thread says is under way, not more than once in a while, and not at its beginning."""
        loop = asyncio.get_running_loop()
        told = loop.time()

        def tell(text: str) -> None:
            nonlocal told
            if text and loop.time() - told > _TELL_EVERY_S:
                told = loop.time()
                loop.call_soon_threadsafe(self._display.step, text)

        return tell

    async def _check(self, *, resumed: bool, without_results: bool = False) -> Checked:
        stopped, say = threading.Event(), self._slowly()

        def tell(text: str) -> None:
            if stopped.is_set():
                raise InputError("interrupted")
            say(text)

        reading = InputReader(
            exclude=self._output.path,
            written=self._workload.result_files,
            spool=self._output.spool_path,
            resumed=resumed,
            without_results=without_results,
            index=self._output.index_path,
            kept=self._output.kept,
            cloud=cloud_of(self._settings),
            own=self._workload.bucket(self._settings),
            parts=self._parts(self._output.stored_config),
            progress=lambda rows, size: tell(f"checking the input: {counted(rows, 'row')}, {size >> 20} MiB"),
            tell=tell,
        )
        checking = asyncio.ensure_future(asyncio.to_thread(self._workload.check, self._settings, reading))
        try:
            checked = await asyncio.shield(checking)
        except asyncio.CancelledError:
            stopped.set()  # or the thread would read on to the end of the input
            await asyncio.wait([checking])
            if checking.exception() is None:
                checking.result().close()
            raise
        if self._target.private is not None and self._run is None:
            self._cluster.tell()  # else when it has answered
        notes = (*(checked.source.notes if checked.source else ()), *checked.notes)
        for note in notes if self._run is None else ():  # of an input that is followed, files say the rest
            self._note(noted(note))
        return checked

    def _parts(self, stored: JsonObject | None) -> Parts | None:
        """Of the run's input, where that is followed, or was."""
        if stored is None or not (self._followed or lookup(stored, f"input.{FOLLOWED}")):
            return None
        return Parts.of(stored, grows=self._options.retry is None)

    async def _compared(self, stored: JsonObject, checked: Checked, hint: str = "") -> list[str]:
        """As `compare`. ConfigError that names what changed since the run was made."""
        new = checked.config
        before, changed = lookup(stored, "input.digest"), None
        if checked.source is not None and before and before != lookup(new, "input.digest"):
            changed = await asyncio.to_thread(checked.source.first_change, self._output.index_path, before)
        return compare(self._workload, self._output, stored, new, changed, hint)

    def _tell_kept(self, kept: Sequence[str]) -> None:
        for one in kept:
            self._note(f"note: {one}")

    def _reached(self, patience_s: float, checked: Checked) -> AbstractAsyncContextManager[Runs]:
        own = self._cluster.is_own
        return self._cluster.reached(_PATIENCE_S if own else patience_s, self._options.command(), checked.slots)

    async def _agree(
        self,
        runs: Runs,
        run_id: str,
        stored: JsonObject | None,
        checked: Checked,
        *,
        new: bool,
    ) -> JsonObject:
        """The configuration the run goes on with, or starts with; the directory is the run's afterwards."""
        workload = self._workload
        named = self._options.name or checked.config.get("run", {}).get("name", "")
        self._name = named or self._output.path.resolve().name
        try:
            status = None if new else await runs.get(run_id)
        except NotFoundError:
            status = None
            await self._refuse_to_lose(run_id, stored, checked)
        if status is not None:
            self._name = status.spec.name
            if self._options.name not in ("", self._name):
                self._display.note(f"note: the run keeps its name, {self._name!r}")
            ledger: JsonObject = json.loads(status.spec.config)
            if ledger.get(CARRIED) and checked.carried is None:
                checked.carry(await asyncio.to_thread(Carried.read, self._output.path, ledger[CARRIED]))
            if stored is None:
                keep_names(ledger, checked.config, checked.snapshots)
                workload.finalize(checked)
            free = {key: value for key, value in checked.config.items() if key in workload.free}
            self._tell_kept(await self._compared(ledger | free, checked))
            config = resumed_config(workload, ledger, checked.config)
            if status.state != "completed":
                config = await self._follow_limits(runs, run_id, config, checked)
        else:
            config = checked.config
            if self._target.private is None:
                await name_trees(config, [one for one in checked.trees if not one.always], self._display.step)
        if checked.source is not None:
            await asyncio.to_thread(checked.source.verify_objects)  # before the directory is the run's
        self._output.claim(run_id, config, workload.result_files, checked.keep)
        await self._place.claim()
        if checked.source is not None and not checked.partly:
            await asyncio.to_thread(checked.source.keep)
        return config

    async def _refuse_to_lose(self, run_id: str, stored: JsonObject | None, checked: Checked) -> None:
        """ConfigError where results of the run, which its cluster does not know, may be in the directory."""
        if stored is not None and not collected(self._workload, self._output):
            return
        collector = await self._collector(run_id, checked.config, checked)
        collector.close()
        raise ConfigError(
            f"{self._gone(run_id)}\nTo start a new run, name another output directory"
            + "".join(f"\n{fault}: only the ledger has what is missing" for fault in collector.faults)
        )

    async def _follow_limits(self, runs: Runs, run_id: str, config: JsonObject, checked: Checked) -> JsonObject:
        """The run's configuration with the limits that this command gives: they hold for what has no result."""
        workload = self._workload
        changed = changed_limits(workload, config, checked.config)
        if not changed:
            return config
        config = with_limits(config, changed)
        await runs.set_limits(run_id, workload.spec(run_id, config).config, workload.limits(config))
        for key, (was, now) in changed.items():
            said = f"{workload.changeable[key]}: {json.dumps(was)} -> {json.dumps(now)}"
            self._display.note(f"note: {said}, for {workload.unit} that have no result")
        return config

    def _gone(self, run_id: str) -> str:
        """Why its cluster does not know the run, and how to go on with it if that is possible."""
        output = self._output.path
        named = f"{output / RUN_ID} names run {run_id}"
        if self._cluster.had_ledger:
            return f"{named}, which was deleted"
        go_on = "To go on with it, name the cluster where it was started: --coordinator HOST:PORT or --context NAME"
        if self._target.private is not None:
            state = output / STATE_DIR
            if any(run.run_id == run_id for run in known_private_runs()):
                return f"{named}, whose private cluster, {state}, was deleted: it alone could go on with the run"
            return (
                f"{named}, whose cluster is not known here: where that was a private one, {state} was deleted, or left "
                f"behind when the directory was copied\n{go_on}"
            )
        where = f'cluster "{self._target.cluster}" at {self._cluster.address}'
        if origin_of(output, run_id) is not None:
            return f"{named}, which was started on {where} and deleted there"
        return f"{named}, and {where} has no such run\n{go_on}; --local, if that was on this machine alone"

    async def _carry_out(
        self,
        runs: Runs,
        run_id: str,
        config: JsonObject,
        checked: Checked,
        *,
        resumed: bool,
    ) -> int:
        collector = await self._collector(run_id, config, checked)
        for fault in collector.faults:
            self._display.note(f"note: {fault}; what it should hold is written anew from the ledger")
        shown = ShownOutput(runs, run_id, self._display) if self._options.show_output else None
        publisher = self._publisher(runs, run_id, config, checked)
        run = CollectedRun(
            self._workload,
            runs,
            run_id,
            config,
            self._rows(runs, run_id, config, checked),
            collector,
            self._display,
            self._place,
            name=self._name,
            beside=[one for one in (shown, publisher) if one is not None],
            failure=self._cluster.failure,
        )
        self._run, self._began_at = run, asyncio.get_running_loop().time()
        try:
            named = chosen().go_on or self._options.resume is not None
            opening = run.open(resumed=resumed, go_on=named, command=self._command(resume=short(run.run_id)))
            status = await self._unless_failed(opening)
            if shown is not None and resumed:
                await shown.skip()
            await run.remember(self._target, self._output.path, self._name)
            runs.patience_s = _PATIENCE_S
            # A run whose every unit is in the ledger may still lack a tree: an earlier command was cut off.
            if status.state == "running":
                await self._unless_failed(self._snapshots.provide(run, config, checked.snapshots))
                await self._unless_failed(upload_trees(runs, run_id, config, checked.trees, self._display.step))
            return await run.carry_out(detach=self._command() if self._options.detach else "")
        finally:
            await asyncio.shield(asyncio.to_thread(run.close))

    def _rows(self, runs: Runs, run_id: str, config: JsonObject, checked: Checked) -> InputRows:
        if checked.queue is None or self._queues is None:
            return InputRows(self._workload, checked, config)
        intake = Intake(
            self._queues.input,
            runs,
            run_id,
            self._workload.item_factory(checked, config),
            skip=checked.queue.skip,
            lease_s=checked.queue.cloud.lease_s,
            stop_when_empty_s=checked.queue.stop_when_empty_s,
            directory=self._output.path,
            tell=self._display.note,
        )
        return QueueRows(self._workload, checked, config, intake)

    def _publisher(self, runs: Runs, run_id: str, config: JsonObject, checked: Checked) -> Publisher | None:
        if self._queues is None or self._queues.output is None:
            return None
        return Publisher(
            self._queues.output,
            runs,
            run_id,
            self._workload.writer(config).lines,
            directory=self._output.path,
            where=self._place.shown,
            tell=self._display.note,
        )

    async def _collector(self, run_id: str, config: JsonObject, checked: Checked) -> Collector:
        return await asyncio.to_thread(open_collector, self._workload, self._output, run_id, config, checked.total)

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Before results are collected, which looks at it itself: nobody waits for a cluster that has ended."""
        return await unless(work, self._cluster.failure)

    def _complete_text(self, summary: JsonObject) -> str:
        workload = self._workload
        units = summary[workload.unit]
        results = Path(workload.result_files[0]).stem
        outcome = workload.outcome(summary) or (
            f"{units['completed']} {results}, {unsuccessful(units['failed'], units['invalid'])}"
        )
        first, *others = outcome.split("\n")
        said = f"run {short(summary['run_id'])} is complete already: {first}, in {self._place.shown}"
        return "\n".join([said, *others])

    # ---- trouble and interruption

    def _command(self, *, resume: str = "") -> str:
        return self._options.command(self._cluster.addresses, resume=resume)

    def _say_interrupted(self) -> None:
        self._display.close()
        run, command, unit = self._run, self._command(), self._workload.unit
        if run is None:
            known = self._known
            said = f"interrupted before run {known} was asked for; what it has is safe" if known else _NOTHING_SENT
            lines = [said, f"continue with: {command}"] if known else [said]
            lines += self._left_lock()
            self._display.event("interrupted", "\n".join(lines), run_id=known, committed=0, command=command)
            return
        committed = run.committed
        directory = self._workload.directory(self._settings)
        lines = [f"interrupted: {run.written} are in {directory}; nothing is lost"]
        lines += self._place.uploaded(committed, of_unit(run.total, unit))
        lines += self._left_lock()
        if self._target.private is None:
            how = "is paused" if run.finishing else "goes on"
            submitted = (
                "" if run.submitted >= run.total else f" ({run.submitted} of {of_unit(run.total, unit)} are submitted)"
            )
            run_id = short(run.run_id)
            stop = "" if run.finishing else f"; stop it with: rollout run pause {run_id}"
            lines.append(f"run {run_id} {how} at the cluster{submitted}{stop}")
        lines.append(f"continue with: {command}")
        if run.may_hang:
            limits = {key.removeprefix("run."): option for key, option in self._workload.changeable.items()}
            option = next(option for key, option in limits.items() if key.startswith("timeout"))
            of = short(run.run_id)
            if self._target.private is not None:
                of += f" --dir {shlex.quote(str(directory))}"
            lines.append(
                f"if a row hangs: that command with {option} sets a limit for all that have no result; rollout item "
                f"cancel {of} ROW ends a single one"
            )
        self._display.event("interrupted", "\n".join(lines), run_id=run.run_id, committed=committed, command=command)

    def _left_lock(self) -> list[str]:
        """Of a command that ends at once."""
        return [self._place.lock_text] if self._place.lock_text else []

    def _at_once(self) -> None:
        """The second Ctrl-C."""
        self._cluster.kill()
        self._say_interrupted()
