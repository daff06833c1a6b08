"""What a workload is: a package that says what its units are, how they become items and how results become files.

A workload is a class derived from `Workload`, registered under the entry point group `rollout.workloads` as
`NAME = "package.module:Class"`. What runs its items on a worker is registered under `rollout.executors`, usually by the
same name. Scheduling, retries, resume, progress, interrupts, exit codes and the writing of files are no business of
either: they stand once in `rollout.workloads` and `rollout.cli.session`.

In the order of use, for a new run:

1. `check(settings, reading)`: all of the input is read once and every fault of it is found, before anything starts.
2. `spec(run_id, config)`, `plan(checked, config, start)`: the run and its items, lazily, from any place on.
3. `writer(config)`: what each entry of the commit log becomes in which file, and the summary.

Commands of its own, and what `rollout --help` says of them, are in a package `commands` beside the module of the class
(`rollout.workloads.registered`). A workload without has the standard command, and its class is then imported for every
`rollout --help`: import engines, grpc and the like where they are used.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast, runtime_checkable

from pydantic import BaseModel

from rollout.cloud.url import BucketUrl
from rollout.config.cloud import CloudSection
from rollout.config.declared import on_resume, parts_that_follow
from rollout.config.load import load_settings
from rollout.config.scratch import Scratch
from rollout.model.counts import counted, of_unit
from rollout.model.errors import ConfigError, InputError
from rollout.model.item import INVALID, ItemLimits, NewItem, Outcome
from rollout.model.run import Order, RunSpec
from rollout.workloads.arriving_rows import QueueInput, queue_input
from rollout.workloads.carrying import CARRIED, Carried, carry_over
from rollout.workloads.carrying import describe as describe_carried
from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Digest, Part
from rollout.workloads.following import FOLLOWED, Parts, form_of
from rollout.workloads.input_format import JSONL, InputFormat
from rollout.workloads.input_lines import Line
from rollout.workloads.input_selection import ALL, Selection
from rollout.workloads.invalid import invalid_of
from rollout.workloads.json_form import JsonObject, canonical, lookup, parse_result
from rollout.workloads.output import DIRECTORY_KEY
from rollout.workloads.remote_directory import bring_directory
from rollout.workloads.sections import OutputPlace, QueuedInput, WorkersSection
from rollout.workloads.source import NO_ROWS, InputReport, Source
from rollout.workloads.spool import Tell, quiet

UNEXPECTED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    InputError,
    ConfigError,
)
"""What a workload may raise that shows a configuration, an input or a result which another version of it wrote, or
another program."""
ABOUT = "verifies"
"""Key of the configuration of a run that only looks at another one, whose id it has: who says @last means that one."""
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InputReader:
    """How a check reads its input: with `rows`, so that what is submitted later is what was checked.

    `exclude`: the run's output directory, into which no wildcard reaches. `written`: what runs of the workload write.
    `spool`: where copies of pipes stay for the next command; None: nowhere. `resumed`: the run is known. `index`: where
    the hashes of the rows will stay; None: nothing will be submitted. `kept`: what the check of the run put into
    `Checked.keep`; empty where that is not known. `without_results`: the run failed before any unit had a result, so
    OtherRunError is welcome: another run begins in its place. `progress(units, bytes)`, `tell(text)`: called now and
    then; they raise when the person has asked to stop. `cloud`: how buckets are reached. `own`: the output directory,
    where that is in a bucket; `exclude` is the one on this machine all the same. `parts`: of the run, whose input is
    followed.
    """

    exclude: Path
    written: tuple[str, ...] = ()
    spool: Path | None = None
    resumed: bool = False
    without_results: bool = False
    index: Path | None = None
    kept: JsonObject = field(default_factory=JsonObject)
    progress: Callable[[int, int], None] | None = None
    tell: Callable[[str], None] = lambda text: None
    cloud: CloudSection = field(default_factory=CloudSection)
    own: BucketUrl | None = None
    parts: Parts | None = None

    def rows(
        self,
        patterns: Sequence[str],
        read: Callable[[Line], object],
        *,
        beside: Callable[[Line], bytes] | None = None,
        skip: bool | None = False,
        key: str = "input.glob",
        form: InputFormat = JSONL,
        selection: Selection = ALL,
        parts: Parts | None = None,
    ) -> tuple[Source, InputReport]:
        """Hand every line of the files that match to `read`, which raises InputError with what is wrong with it.

        InputError with every fault. The source goes into `Checked`. `skip`: bad rows are no fault; `Checked.lines`
        gives them with their `fault`, and `plan` makes each an `invalid_item` (`rollout.workloads.invalid`); None: the
        workload has no such choice. `key`: of the configuration, for people. `form`: what the files hold.
        `selection`: only these rows are. `parts`: as of `Source.open`. `beside`: as of `Source.check`.
        """
        source = self.open(patterns, key, form, selection, parts)
        report = source.check(read, beside=beside, index=self.index, skip=skip, progress=self.progress)
        source.notes += _left_out(report)
        return source, report

    def input(
        self, section: QueuedInput, read: Callable[[Line], object], beside: Callable[[Line], bytes] | None = None
    ) -> Rows:
        """As `rows`, of `[input]`; rows that arrive from a queue are read when they come. ConfigError, InputError."""
        if section.queue:
            return Rows(queue=queue_input(section, self.cloud))
        form = form_of(section)
        patterns = section.patterns
        if form.kind == "dataset":
            patterns = [str(self.directory(pattern, "input.glob") or pattern) for pattern in patterns]
        part = Selection(section.limit, section.sample, section.sample_seed)
        if self.parts is not None and part != ALL:
            key = "limit" if section.limit else "sample"
            raise ConfigError(f"input.{key}: the input of this run was followed, all of it: leave it out")
        parts = self.parts or (Parts() if section.follow else None)
        skip = section.skips_bad_rows or (parts is not None and "on_bad_row" not in section.model_fields_set)
        return Rows(*self.rows(patterns, read, beside=beside, skip=skip, form=form, selection=part, parts=parts))

    def directory(self, text: str, key: str) -> Path | None:
        """A directory in a bucket, on this machine; None: `text` is no URL of one. As `bring_directory`."""
        return bring_directory(text, key, self.cloud, self.tell)

    def open(
        self,
        patterns: Sequence[str],
        key: str = "input.glob",
        form: InputFormat = JSONL,
        selection: Selection = ALL,
        parts: Parts | None = None,
    ) -> Source:
        """The files that match, unread. InputError."""
        return Source.open(
            patterns,
            exclude=self.exclude,
            spool=self.spool,
            resumed=self.resumed,
            written=self.written,
            tell=self.tell,
            key=key,
            cloud=self.cloud,
            own=self.own,
            form=form,
            selection=selection,
            parts=parts,
        )


def input_section(patterns: Sequence[str], report: InputReport) -> JsonObject:
    """`input` of a run's configuration, by which a later command sees whether and how the input changed."""
    return {
        "glob": list(patterns),
        **report.selection.stored(),
        "rows": report.rows,
        "invalid": report.invalid,
        "digest": report.digest,
        "files": [{"path": file.path, "rows": file.rows, "digest": file.digest} for file in report.files],
        **({FOLLOWED: True} if report.followed else {}),
    }


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a run: of files, which have been read, or of a queue."""

    source: Source | None = None
    report: InputReport = NO_ROWS
    queue: QueueInput | None = None

    def section(self, patterns: Sequence[str]) -> JsonObject:
        """`input` of the run's configuration."""
        return self.queue.section() if self.queue else input_section(patterns, self.report)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


@dataclass(frozen=True, slots=True)
class Tree:
    """A local directory that workers need. It travels as objects; its content id becomes part of the configuration.

    `key`: dotted key of the run's configuration that receives the id of the manifest, in hex, unless the check put it
    there. `always`: also when coordinator and workers run on this machine; else they read `path` itself. `files`: those
    that travel, with their names in the tree; None: all that is there.
    """

    key: str
    path: Path
    always: bool = False
    files: tuple[tuple[str, Path], ...] | None = None


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot that a table of `Checked.snapshots` names. `config`: of the run that made it; `result`: of the item
    that did, as that run's workload decodes it."""

    id: str
    run_id: str
    config: JsonObject
    result: JsonObject


@dataclass(kw_only=True)
class Checked:
    """What a check found. A workload keeps in a subclass of its own what `plan` needs.

    `config` is the run's configuration as executors and a later resume need it: a JSON object of sections, files read
    and defaults written out. The shared machinery reads of it
    - `input`: a `digest` of all units, and what else says how the input changed (`input_section`);
    - `run`: name, priority, order, max_in_flight (`spec`).
    An executor of another name than the workload's gets `executors.NAME` of it.

    `total`: units in the input; the run completes with as many. `invalid`: those of them that are no rows.
    `source`: where `plan` reads them again.
    `trees`: what workers need of this machine's disk. `keep`: what the check of a later command wants to know of the
    run (`InputReader.kept`); it stays in the output directory. `notes`: what the person is to be told.
    `follows`: why the run of the output directory is not the one that is asked for, for people: it is ended, and
    `Workload.follow` says what is left for another run in its place; empty: it is that run.
    `snapshots`: keys of tables of the configuration whose `uri` names a snapshot (and whose `step` may say which of a
    run's); `Workload.found` puts `snapshot` and `content_id` there once a cluster has said which one that is.
    `queue`: where rows arrive from while the run goes on; `total` is then 0, and `Workload.item_factory` takes the
    place of `Workload.plan`.
    `carried`: of the run before in the output directory; only the other rows are units. `retry`: as in `carry_over`, of
    the run that is to follow. `partly`: rows of `source` after the first `total` are no units.
    `apart`: by result file, in rising order: the rows of the input whose results go there, and not to the first one.
    `may_be_fewer`: the run may end after fewer units than `total`.
    `slots`: attempts at once of each worker that is started here, of an executor that runs in slots.
    """

    config: JsonObject
    total: int
    invalid: int = 0
    source: Source | None = None
    trees: tuple[Tree, ...] = ()
    keep: JsonObject = field(default_factory=JsonObject)
    notes: tuple[str, ...] = ()
    snapshots: tuple[str, ...] = ()
    follows: str = ""
    queue: QueueInput | None = None
    carried: Carried | None = None
    retry: frozenset[str] | None = None
    partly: bool = False
    apart: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    may_be_fewer: bool = False
    slots: int = 1

    def lines(self, start: int) -> Iterator[Line]:
        """The lines of the input from unit `start` on, once more. InputChangedError where they are others now."""
        if self.source is None:
            raise RuntimeError("this check kept no source")
        if self.carried is not None:
            return islice(self.carried.pick(self.source.rows(self.carried.row(start))), self.total - start)
        rows = self.source.rows(start)
        return islice(rows, self.total - start) if self.partly else rows  # to its end, or nobody sees that it grew

    def carry(self, carried: Carried) -> None:
        """Only the rows that are not carried on are units."""
        self.carried, self.total = carried, carried.total
        self.config[CARRIED] = carried.section()

    def close(self) -> None:
        """Nothing is read of the input any more."""
        if self.source is not None:
            self.source.close()


@dataclass(slots=True)
class Totals:
    """Counts over a run's commit log so far. Durations are of attempts; times are Unix milliseconds."""

    rows: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0
    invalid: int = 0  # of failed
    units_in: int = 0
    units_out: int = 0
    duration_ms: int = 0
    longest_ms: int = 0
    first_ms: int = 0
    last_ms: int = 0

    def count(self, entry: CommitEntry) -> None:
        self.rows += 1
        name = entry.outcome.name.lower()
        setattr(self, name, getattr(self, name) + 1)
        self.invalid += entry.failure is not None and entry.failure.code == INVALID
        self.units_in += entry.units_in
        self.units_out += entry.units_out
        self.duration_ms += entry.duration_ms
        self.longest_ms = max(self.longest_ms, entry.duration_ms)
        self.first_ms = min(self.first_ms or entry.accepted_ms, entry.accepted_ms)
        self.last_ms = max(self.last_ms, entry.accepted_ms)


class Writer(Protocol):
    """From entries of the commit log to lines of files. It opens none: the collector does, and resumes them."""

    files: tuple[str, ...]
    """Names of the files that `lines` may name; all are made."""

    def lines(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        """(file, bytes of one or more whole lines) for each line that `entry` becomes, in order.

        It depends on `entry` and the run's configuration alone: a file may have to be written anew from the ledger.
        A line holds nothing of a worker's that was not parsed and encoded here: `rollout.workloads.json_form`.
        InvalidResultError, with nothing remembered of `entry`: its result cannot be used. It is then asked for again,
        with that as the failure of `entry`.
        """
        ...

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        """What `summary.json` holds: `summary` has what every workload says, and the workload adds its own."""
        return summary


@runtime_checkable
class Remembering(Protocol):
    """A writer whose summary says more than totals do: what it must know of entries before is in `memory`, which is
    saved with the files, given back to the writer of a later command, and empty when the files are written anew."""

    memory: JsonObject


@runtime_checkable
class Carrying(Remembering, Protocol):
    """A writer that merges the lines of an earlier run with its own. What was taken of them is in `memory`."""

    def open(self, directory: Path) -> None:
        """First. Blocking. StateError: the lines are not there any more."""
        ...

    def before(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        """As `Writer.lines`: those that stand before the ones of `entry`."""
        ...

    def rest(self) -> Iterable[tuple[str, bytes]]:
        """Those that follow the last entry of a run that is completed."""
        ...


Fetch = Callable[[bytes, Path], Awaitable[None]]
"""Bring an object to a file. NotFoundError, OSError."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """An attempt that did not end its item. `data`: what its executor left of it, as that of a result. `worker_lost`:
    its worker, or its process, was lost."""

    attempt: int
    code: str
    message: str
    data: bytes = b""
    worker: str = ""
    began_ms: int = 0
    ended_ms: int = 0
    worker_lost: bool = False


class Ledger(Protocol):
    """What is asked of the cluster of a run beside its commit log."""

    async def fetch(self, object_id: bytes, path: Path) -> None:
        """As `Fetch`."""
        ...

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        """At the item `seq`, in order. NotFoundError."""
        ...


@runtime_checkable
class ArtifactWriter(Protocol):
    """A writer that has files of its own, beside those whose lines it gives: a directory for each entry, say, and what
    is reckoned over all entries so far. All are below `directory`, that of the output."""

    def open(self, directory: Path) -> None:
        """First. Blocking."""
        ...

    def begin(self) -> Iterable[tuple[str, bytes]]:
        """The files are empty: lines that stand before those of the first entry, as `lines` has them."""
        ...

    def take_up(self) -> None:
        """The files are as an earlier command left them. Blocking."""
        ...

    async def place(self, entry: CommitEntry, ledger: Ledger) -> str:
        """Bring what belongs to `entry`, before `lines` is asked for it. It may come again, for an entry whose lines
        were not written, or are written anew. What a person should know; empty: nothing."""
        ...

    def refresh(self, state: str = "") -> None:
        """Bring what depends on all entries up to date, now and then. `state`: of a run that has ended. Blocking."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """A unit that runs. `note`: what it said last of how far it is. `tries`: this one included."""

    seq: int
    seconds: float
    note: str
    tries: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A table of how far a run is, beside its bar: `heads`, `rows`, and `running`, a line each, of `n_running` in all.
    `line`: what else there is to say. `fields`: all of it for programs. `extent`: what the bar counts, how many are
    done, how many there are; None: units."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    running: tuple[tuple[str, ...], ...]
    n_running: int
    line: str
    fields: JsonObject
    extent: tuple[str, int, int] | None = None


@runtime_checkable
class Showing(Protocol):
    """A writer that knows what a person wants to see of the run while it goes on."""

    def board(self, running: Sequence[Running], n_running: int) -> StatusTable:
        """`running`: the first of the `n_running` units that run."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A writer that keeps in its files how the run stands while it goes on."""

    def watch(self, state: str, reason: str) -> None:
        """The run is in this state, for this reason, now. Each time before `refresh`."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRun:
    """What follows from a run that failed, because no worker could start it or by a unit of it.

    `recovery_hint`: how it goes on. `refusal`: what is wrong with the input or the configuration, if that is why: the
    command ends as if its check had found it. `without_results`: the files hold nothing that is worth going on from:
    then OtherRunError of `check` starts another run in its place (`InputReader.without_results`)."""

    recovery_hint: str = "when that is mended, the same command goes on with them"
    refusal: str = ""
    without_results: bool = False


@runtime_checkable
class SnapshotMaker(Protocol):
    """A workload whose items leave snapshots that other runs may begin with."""

    def snapshot_of(self, entry: CommitEntry) -> JsonObject | None:
        """The result of an entry that left one: `snapshot`, its id in hex, `step`, `size` in bytes, and what else
        `FoundSnapshot.result` says."""
        ...


@runtime_checkable
class Priced(Protocol):
    """A workload whose configuration may say what its units cost."""

    def cost(self, config: JsonObject, totals: Totals) -> str:
        """What a run has cost so far, for people; empty: its prices are not known. Of `totals`, `done`, `units_in` and
        `units_out` are known. UNEXPECTED: as `Workload.digest`."""
        ...


Settings = TypeVar("Settings", bound=BaseModel)
Found = TypeVar("Found", bound=Checked)


class Workload(ABC, Generic[Settings, Found]):
    """Made once a process, without arguments. Class variables without a value have to be given one."""

    name: ClassVar[str]
    help: ClassVar[str] = ""
    """A sentence for `rollout --help`, of a workload whose package has no `commands`: those say their own."""
    settings: ClassVar[type[BaseModel]]
    """Model of the configuration file: `Settings`."""
    sections: ClassVar[frozenset[str]] = frozenset()
    """Top-level tables by which `rollout plan` knows a file of this workload; empty: it has no files."""
    details: ClassVar[str] = ""
    """Paragraphs for the help of `rollout NAME run --config FILE`, its command, where its package has no `commands`
    (`registered`)."""

    unit: ClassVar[str] = "rows"
    """What its units are called in progress and summaries, plural."""
    endless: ClassVar[bool] = False
    """Its items go on until their run is ended: there is no share of them that is done."""
    measure: ClassVar[str] = ""
    """What `units_out` of an entry counts, such as tokens; empty: nothing that a person wants to see."""
    carries: ClassVar[tuple[str, ...]] = ()
    """Sections of the configuration that follow from the rows, where rows that were added to the input of a run that is
    complete can run by themselves (`--extend`). Its units are the rows of [input], and lines of its files are in their
    order, or follow each other as they came."""
    finishes_running: ClassVar[bool] = False
    """The first Ctrl-C starts no further unit and waits for those that run, which are long and dear."""
    result_files: ClassVar[tuple[str, ...]]
    """Every file that a run may write into its output directory, the most important first, `summary.json` included."""

    output_of_rows: ClassVar[Mapping[str, JsonObject]] = MappingProxyType({})
    """By a key that the first row of an input may have: keys of [output] that fit it, for files that are written
    without the run's configuration file."""
    directory_key: ClassVar[str] = DIRECTORY_KEY
    """The key of the settings that says where `directory` is."""
    makes_way: ClassVar[bool] = False
    """A run that failed before any unit had a result makes way for one with other settings, in the same directory."""
    free: ClassVar[frozenset[str]] = frozenset({"output", "workers"})
    """Sections that change no result and are no part of the run: a resumed run may set them anew."""

    # ---- the settings

    @property
    def recorded(self) -> Mapping[str, str]:
        """Dotted keys that change how and not what: a resumed run keeps its value, and the person is told so. They are
        declared in `settings` (`rollout.config.declared`)."""
        return on_resume(self.settings, "keep")

    @property
    def changeable(self) -> Mapping[str, str]:
        """Dotted keys of limits and the like, and how a person sets each: a resumed run follows the new value for units
        that have no result (`limits`). They are declared as `recorded` ones are."""
        return on_resume(self.settings, "follow")

    @property
    def changeable_parts(self) -> Mapping[str, frozenset[str]]:
        """By dotted key, of tables that are `changeable` in a part: the entries that are."""
        return parts_that_follow(self.settings)

    def directory(self, settings: Settings) -> Path:
        """The output directory: `[output] dir`, unless a workload has another."""
        return _output_of(settings).directory

    def bucket(self, settings: Settings) -> BucketUrl | None:
        """Where the files of the output directory are to be, if that is in a bucket; `directory` is then where they are
        collected on this machine (`rollout.workloads.staging`)."""
        output = getattr(settings, "output", None)
        return output.bucket if isinstance(output, OutputPlace) else None

    def workers(self, settings: Settings) -> int:
        """Workers that an embedded cluster starts: `[workers] count`, or one."""
        section = getattr(settings, "workers", None)
        return section.count if isinstance(section, WorkersSection) else 1

    @property
    def executors(self) -> tuple[str, ...]:
        """Those that its items name, which alone these workers load; empty: all that are installed."""
        return ()

    def load(self, path: Path | None, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Settings:
        """The settings in a file; None: in `overrides` alone, as in `load_settings`. ConfigError: all that is wrong."""
        return cast("Settings", load_settings(self.settings, path, overrides))

    def works_here(self) -> None:
        """Its workers are started on this machine, or would be: `load` and `check` then look at what those need."""
        return

    def check_host(self, settings: Settings) -> None:
        """ConfigError when workers that this machine starts could not do the work: a package that is missing, say."""
        return

    def host_notes(self, settings: Settings) -> list[str]:
        """What the person should know of this host, where workers are started on it."""
        return []

    # ---- input to items

    @abstractmethod
    def check(self, settings: Settings, reading: InputReader) -> Found:
        """Read all of the input once and find every fault. Blocking; writes nothing.

        ConfigError or InputError with all that is wrong, each as `file:line: what, and what would be right`.
        """

    @abstractmethod
    def plan(self, checked: Found, config: JsonObject, start: int) -> Iterator[NewItem]:
        """Items from seq `start` on, in order, lazily; seq n is unit n, counted from 0. Runs in a thread.

        `config` is the run's own, which on resume may be older than `checked.config`. `checked.lines(start)` raises
        InputChangedError where the input is not what was checked.
        """

    def item_factory(self, checked: Found, config: JsonObject) -> Callable[[Line], NewItem]:
        """Of rows that arrive from a queue (`Checked.queue`): what makes an item of one, whose `file` names its message
        and whose `index` is its seq. InputError: it is no row. The item's id tells what it does, not where it stands.
        Called in a thread."""
        raise NotImplementedError

    def found(self, checked: Found, key: str, snapshot: FoundSnapshot) -> None:
        """What the table `key` of `checked.config` names. ConfigError: it is of no use there."""
        lookup(checked.config, key).update(snapshot=snapshot.id, content_id=snapshot.id)

    def finalize(self, checked: Found) -> None:
        """Every snapshot that `checked.config` names is known: what depends on it may be worked out."""
        return

    def limits(self, config: JsonObject) -> ItemLimits:
        """Of each item of a run with this configuration. Asked where something is `changeable`."""
        raise NotImplementedError

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        """The run to open, without the free sections, so that opening it again compares equal."""
        run: JsonObject = config.get("run", {})
        return RunSpec(
            run_id=run_id,
            workload=self.name,
            config=canonical({key: value for key, value in config.items() if key not in self.free}),
            name=run.get("name", ""),
            order=Order(run.get("order", Order.SCHEDULE)),
            priority=run.get("priority", 0),
            max_in_flight=run.get("max_in_flight", 0),
        )

    # ---- commit log to files

    @abstractmethod
    def writer(self, config: JsonObject) -> Writer: ...

    def plan_followup(self, checked: Found, config: JsonObject, directory: Path, tell: Tell = quiet) -> str:
        """The run of `directory` is over, and what it came to is in the files: `checked`, which `follows` it, becomes
        what is left for another, whose `total` may be 0. What the person is to be told. `config`: that of the run that
        is over. `tell` hears what is under way. Blocking; what it writes counts once the other run has the directory.

        By default the rows that were added to the input, and those that failed as `checked.retry` says."""
        names = self.writer({**checked.config, CARRIED: None}).files
        rows = lookup(checked.config, "input.rows")
        carried = carry_over(directory, config, names, rows, checked.retry, checked.apart, tell)
        if carried.total == 0:
            checked.follows = ""
            return "no row failed: there is nothing to run again"
        checked.carry(carried)
        return describe_carried(carried)

    async def finished(
        self, fetch: Fetch, config: JsonObject, directory: Path, summary: JsonObject, tell: Callable[[str], None]
    ) -> list[str]:
        """Make what is made once, of a run that is completed or failed and whose files are written, where it is not
        there yet; the paths of what was made. Each later command calls it again for one that is completed: an earlier
        one may have been ended in its midst.

        `config` is the run's, with the free sections as they are now. `tell` hears what a person should know.
        """
        return await asyncio.to_thread(self.derive, config, directory) if summary["state"] == "completed" else []

    def derive(self, config: JsonObject, directory: Path) -> list[str]:
        """As `finished`, of what is made of the result files alone. Blocking."""
        return []

    # ---- for people

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        """What a person calls the input of an item, and where it came from (`file:line`), empty where that is not
        known. Any of UNEXPECTED: these bytes are none of this workload's."""
        bad = invalid_of(payload)
        return self.row_input(payload) if bad is None else (bad.input, f"{bad.file}:{bad.line}")

    def row_input(self, payload: bytes) -> tuple[Any, str]:
        """As `item_input`, of an item that is no `invalid_item`."""
        return json.loads(payload), ""

    def item_output(self, data: bytes) -> Any:
        """What a person calls the result of an item. UNEXPECTED: as `item_input`."""
        return parse_result(data, finite=False)

    def digest(self, config: JsonObject) -> Digest | None:
        """What the live page and reports show of a run beside its rows. None: its results are rows, which may be many
        and need no more. UNEXPECTED: the configuration is none of this workload's."""
        return None

    def item_parts(self, config: JsonObject, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        """What is shown of one item beside its input and output: of its `payload` and of its `result`, None where that
        is not asked for. `config`: its run's. UNEXPECTED: as `item_input`. Blocking."""
        return ()

    def outcome(self, summary: JsonObject) -> str:
        """What a run with this summary came to, in a line; empty: how many units were completed, and how fast."""
        return ""

    def failed_for_good(self, summary: JsonObject) -> int:
        """How many units have a line in errors.jsonl and are not invalid."""
        units = summary[self.unit]
        return units["failed"] - units["invalid"]

    def see_also(self, directory: Path) -> str:
        """The command that shows what a run came to whose files are in `directory`; empty: there is none."""
        return ""

    def failed(self, summary: JsonObject) -> FailedRun:
        """What follows from a run that failed with this summary."""
        return FailedRun()

    def exit_code(self, summary: JsonObject) -> int:
        """With which the command ends of a run that was completed with this summary: 0 if that did its work."""
        units = summary[self.unit]
        return 0 if units["completed"] > 0 or units["committed"] == 0 else 1

    def remarks(self, entry: CommitEntry) -> Iterable[tuple[str, str, JsonObject]]:
        """(event, text, its fields) of what a person should hear of an entry of the commit log as it comes."""
        return ()

    def describe(self, settings: Settings, checked: Found) -> list[str]:
        """Lines of `rollout plan`: what a run of this configuration would do."""
        *files, last = self.result_files
        made = f"{', '.join(files)} and {last}" if files else last
        return [f"writes {made} of {of_unit(checked.total, self.unit)} to {self.directory(settings)}"]

    def dry_run(self, settings: Settings, checked: Found) -> JsonObject:
        """Fields of the event of `--dry-run`."""
        invalid = {"invalid": checked.invalid} if checked.invalid else {}
        return {self.unit: checked.total, "workers": self.workers(settings), **invalid}

    def describe_workers(self, settings: Settings) -> str:
        """A line for `describe`."""
        return f"workers when no coordinator is named: {self.workers(settings)}"

    def idles(self, note: str) -> bool:
        """Whether a unit that said `note` last has nothing at work, so that the first Ctrl-C need not wait for it."""
        return False

    def warnings(self, settings: Settings) -> list[str]:
        """What a dry run warns of although it is no fault."""
        return []

    def another_run(self, run: str, changes: Sequence[str]) -> str:
        """How one begins in place of `run` (a short id), of which the settings `changes` were made, for people."""
        return f"by naming another {self.directory_key}"

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        """What changed in `section` of a run's configuration, a line each; empty: nothing that matters.

        None: there is nothing special about it, its keys are compared one by one.
        """
        return None


def _left_out(report: InputReport) -> tuple[str, ...]:
    """What the person is told of rows that cannot be used, where the run goes on without them."""
    if not report.invalid:
        return ()
    shown = "".join(f"\n  {fault}" for fault in report.faults[:3])
    more = f"\n  and {report.invalid - 3:,} more" if report.invalid > 3 else ""
    return (
        f"{report.invalid:,} of {counted(report.rows, 'row')} cannot be used; they go to errors.jsonl as {INVALID} "
        f'(on_bad_row = "skip"):{shown}{more}',
    )


def check_only(
    workload: Workload[Settings, Found], settings: Settings, *, tell: Callable[[str], None] = lambda text: None
) -> Found:
    """All that can be checked without a cluster and an engine. Leaves nothing behind. ConfigError, InputError.

    `tell` hears what is waited for.
    """
    with checked_here(workload, settings, tell=tell) as checked:
        return checked


@contextmanager
def checked_here(
    workload: Workload[Settings, Found], settings: Settings, *, tell: Callable[[str], None]
) -> Generator[Found]:
    """As `check_only`; its rows can be read until the end of the block."""
    with Scratch("rollout-input-") as spool:
        reading = InputReader(
            exclude=workload.directory(settings),
            written=workload.result_files,
            spool=Path(spool),
            tell=tell,
            cloud=cloud_of(settings),
            own=workload.bucket(settings),
        )
        checked = workload.check(settings, reading)
        try:
            yield checked
        finally:
            checked.close()


def cloud_of(settings: BaseModel) -> CloudSection:
    """[cloud] of a configuration; one without any is reached by the providers' usual chains."""
    found = getattr(settings, "cloud", None)
    return found if isinstance(found, CloudSection) else CloudSection()


def _output_of(settings: BaseModel) -> OutputPlace:
    found = getattr(settings, "output", None)
    if not isinstance(found, OutputPlace):
        raise NotImplementedError(
            f"{type(settings).__name__} has no `output` of rollout.workloads.sections.OutputPlace"
        )
    return found


_OUTCOMES = {Outcome.CANCELLED: "cancelled", Outcome.SKIPPED: "skipped", Outcome.FAILED: "failed"}


@dataclass(frozen=True, slots=True)
class Unsuccessful:
    """Why a unit has no result: `code` is stable, `message` for people."""

    code: str
    message: str


def unsuccessful(entry: CommitEntry, unit: str = "row") -> Unsuccessful:
    """Of an entry whose outcome is not DONE."""
    if entry.failure is not None:
        return Unsuccessful(entry.failure.code, entry.failure.message)
    code = _OUTCOMES[entry.outcome]
    return Unsuccessful(code, f"the {unit} was {code}")
