"""The interface of a workload: a package that says what its units are, how they become items and how results become
files.

A workload is a class derived from `Workload`, registered under the entry point group `rollout.workloads` as `NAME =
"package.module:Class"`. The code that runs its items on a worker is registered under `rollout.executors`, usually with
the same name. Neither deals with scheduling, retries, resume, progress, interrupts, exit codes or writing files:
`rollout.workloads` and `rollout.cli.session` do that for all workloads.

In the order of use, for a new run:

1. `check(settings, reading)`: reads all of the input once and finds every fault of it, before anything starts. 2.
`spec(run_id, config)`, `plan(checked, config, start)`: the run and its items, lazily, from any position. 3.
`writer(config)`: the lines of each entry of the commit log, and the summary.

Commands of its own, and their `rollout --help`, are in a package `commands` next to the module of the class
(`rollout.workloads.registered`). A workload without one has the standard command, and its class is imported for every
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
"""What a workload may raise for a configuration, an input or a result that another version of it, or another program,
wrote."""
ABOUT = "verifies"
"""Key of the configuration of a run that only inspects another one, with that one's id; @last then means that one."""
NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InputReader:
    """How a check reads its input: with `rows`, so that what is submitted later is what was checked.

    `exclude` is the run's output directory, which no wildcard matches. `written` are names of files that runs of the
    workload write. `spool` keeps copies of pipes for the next command, None for nowhere. `resumed` means that the run
    is known. `index` is where the hashes of the rows will stay, None if nothing will be submitted. `kept` is what the
    check of the run put into `Checked.keep`; empty if unknown. `without_results` means that the run failed before any
    unit had a result, so OtherRunError is welcome: another run replaces it. `progress(units, bytes)` and `tell(text)`
    are called now and then, and raise if the user interrupts. `cloud` says how to reach buckets. `own` is the output
    directory, if that is in a bucket; `exclude` is then the local one. `parts` are those of a run whose input is
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
        """Pass every line of the matching files to `read`, which raises InputError for a fault.

        Raises InputError with every fault. The source belongs in `Checked`. With `skip`, bad rows are accepted:
        `Checked.lines` yields them with their `fault`, and `plan` makes each an `invalid_item`
        (`rollout.workloads.invalid`); None means that the workload does not support that. `key` is that of the
        configuration, in messages. `form` is the format of the files. `selection` limits the rows. `parts` is that of
        `Source.open`, `beside` that of `Source.check`.
        """
        source = self.open(patterns, key, form, selection, parts)
        report = source.check(read, beside=beside, index=self.index, skip=skip, progress=self.progress)
        source.notes += _left_out(report)
        return source, report

    def input(
        self, section: QueuedInput, read: Callable[[Line], object], beside: Callable[[Line], bytes] | None = None
    ) -> Rows:
        """Do what `rows` does for `[input]`; rows from a queue are read when they arrive. Raises ConfigError or
        InputError."""
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
        """Return the local copy of a directory in a bucket, or None if `text` is not such a URL. Raises the errors of
        `bring_directory`."""
        return bring_directory(text, key, self.cloud, self.tell)

    def open(
        self,
        patterns: Sequence[str],
        key: str = "input.glob",
        form: InputFormat = JSONL,
        selection: Selection = ALL,
        parts: Parts | None = None,
    ) -> Source:
        """Open the matching files without reading them. Raises InputError."""
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
    """Return `input` of a run's configuration, by which a later command sees whether and how the input changed."""
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
    """The rows of a run: from files, which have been read, or from a queue."""

    source: Source | None = None
    report: InputReport = NO_ROWS
    queue: QueueInput | None = None

    def section(self, patterns: Sequence[str]) -> JsonObject:
        """Return `input` of the run's configuration."""
        return self.queue.section() if self.queue else input_section(patterns, self.report)

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


@dataclass(frozen=True, slots=True)
class Tree:
    """A local directory that workers need. It is sent as objects; its content id becomes part of the configuration.

    `key` is the dotted key of the run's configuration that receives the id of the manifest, in hex, unless the check
    set it. `always` sends it even if coordinator and workers run on this machine; otherwise they read `path` itself.
    `files` are those to send, with their names in the tree; None means everything.
    """

    key: str
    path: Path
    always: bool = False
    files: tuple[tuple[str, Path], ...] | None = None


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot that a table of `Checked.snapshots` names. `config` is that of the run that made it; `result` that of
    the item that did, as the run's workload decodes it."""

    id: str
    run_id: str
    config: JsonObject
    result: JsonObject


@dataclass(kw_only=True)
class Checked:
    """The result of a check. A workload keeps in a subclass what `plan` needs.

    `config` is the run's configuration as executors and a later resume need it: a JSON object of sections, with files
    read and defaults explicit. The shared code reads from it
    - `input`: a `digest` of all units, and what else says how the input changed (`input_section`);
    - `run`: name, priority, order, max_in_flight (`spec`). An executor with another name than the workload's gets
    `executors.NAME` of it.

    `total` is the number of units in the input; the run completes with as many. `invalid` of them are not rows.
    `source` is where `plan` reads them again. `trees` are what workers need of this machine's disk. `keep` is what the
    check of a later command needs to know of the run (`InputReader.kept`); it stays in the output directory. `notes`
    are for the user. `follows` says, for the user, why the run of the output directory is not the requested one: that
    run has ended, and `Workload.plan_followup` returns what is left for another run; empty means that it is the
    requested one. `snapshots` are keys of tables of the configuration whose `uri` names a snapshot (and whose `step`
    may say which of a run's); `Workload.found` sets `snapshot` and `content_id` there once a cluster has resolved them.
    `queue` is where rows arrive from during the run; `total` is then 0, and `Workload.item_factory` replaces
    `Workload.plan`. `carried` is taken over from the previous run in the output directory; only the other rows are
    units. `retry` is that of `carry_over`, for the run that follows. `partly` means that rows of `source` after the
    first `total` are not units. `apart` has, by result file and ascending, the rows whose results go there and not to
    the first one. `may_be_fewer` means that the run may end after fewer units than `total`. `slots` is the number of
    attempts at once of each local worker, for an executor that runs in slots.
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
        """Yield the lines of the input from unit `start` on again. Raises InputChangedError if they have changed."""
        if self.source is None:
            raise RuntimeError("this check kept no source")
        if self.carried is not None:
            return islice(self.carried.pick(self.source.rows(self.carried.row(start))), self.total - start)
        rows = self.source.rows(start)
        return islice(rows, self.total - start) if self.partly else rows  # to its end, or nobody sees that it grew

    def carry(self, carried: Carried) -> None:
        """Make only the rows that are not taken over units."""
        self.carried, self.total = carried, carried.total
        self.config[CARRIED] = carried.section()

    def close(self) -> None:
        """Close the input, which is not read any more."""
        if self.source is not None:
            self.source.close()


@dataclass(slots=True)
class Totals:
    """Counts over a run's commit log so far. Durations are of attempts; times are in Unix milliseconds."""

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
    """Converts entries of the commit log to lines of files. It opens no file: the collector does, and resumes them."""

    files: tuple[str, ...]
    """Names of the files that `lines` may name; all are created."""

    def lines(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        """Yield (file, bytes of one or more whole lines) for each line of `entry`, in order.

        It depends on `entry` and the run's configuration alone, because a file may have to be written anew from the
        ledger. Worker data is parsed and encoded here before it goes into a line: `rollout.workloads.json_form`. Raises
        InvalidResultError, remembering nothing of `entry`, if its result is unusable. It is then called again, with
        that as the failure of `entry`.
        """
        ...

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        """Return the content of `summary.json`: `summary` has what all workloads report, and the workload adds its
        own."""
        return summary


@runtime_checkable
class Remembering(Protocol):
    """A writer whose summary needs more than totals. What it must know of earlier entries is in `memory`, which is
    saved with the files, given to the writer of a later command, and empty when the files are written anew."""

    memory: JsonObject


@runtime_checkable
class Carrying(Remembering, Protocol):
    """A writer that merges the lines of an earlier run with its own. Its position in them is in `memory`."""

    def open(self, directory: Path) -> None:
        """Open the lines; called first. Raises StateError if they are gone. Blocking."""
        ...

    def before(self, entry: CommitEntry) -> Iterable[tuple[str, bytes]]:
        """Yield the lines before those of `entry`."""
        ...

    def rest(self) -> Iterable[tuple[str, bytes]]:
        """Yield the lines after the last entry of a completed run."""
        ...


Fetch = Callable[[bytes, Path], Awaitable[None]]
"""Downloads an object to a file. Raises NotFoundError or OSError."""


@dataclass(frozen=True, slots=True)
class FailedTry:
    """An attempt that ended without ending its item. `data` is what its executor left, like that of a result.
    `worker_lost` means that its worker, or its process, was lost."""

    attempt: int
    code: str
    message: str
    data: bytes = b""
    worker: str = ""
    began_ms: int = 0
    ended_ms: int = 0
    worker_lost: bool = False


class Ledger(Protocol):
    """Access to the run's cluster besides its commit log."""

    async def fetch(self, object_id: bytes, path: Path) -> None:
        """Download an object as `Fetch` does."""
        ...

    async def failed_tries(self, seq: int) -> list[FailedTry]:
        """Return the failed tries at the item `seq`, in order. Raises NotFoundError."""
        ...


@runtime_checkable
class ArtifactWriter(Protocol):
    """A writer with files of its own, besides those whose lines it returns: for example a directory for each entry, or
    statistics over all entries so far. All are below `directory`, that of the output."""

    def open(self, directory: Path) -> None:
        """Open the directory; called first. Blocking."""
        ...

    def begin(self) -> Iterable[tuple[str, bytes]]:
        """Return lines that precede those of the first entry; called when the files are empty."""
        ...

    def take_up(self) -> None:
        """Continue from the files of an earlier command. Blocking."""
        ...

    async def place(self, entry: CommitEntry, ledger: Ledger) -> str:
        """Write what belongs to `entry`, before `lines` is called for it, and return a note for the user or "". It may
        be called again for an entry whose lines were not written, or are written anew."""
        ...

    def refresh(self, state: str = "") -> None:
        """Update what depends on all entries; called now and then. `state` is that of a run that has ended.
        Blocking."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """A running unit. `note` is its last progress message. `tries` includes this one."""

    seq: int
    seconds: float
    note: str
    tries: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class StatusTable:
    """A table of a run's progress, below its bar: `heads`, `rows`, and `running` with a line each of `n_running` in
    all. `line` is additional text. `fields` is all of it for programs. `extent` is what the bar counts, how many are
    done, and how many there are; None means units."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    running: tuple[tuple[str, ...], ...]
    n_running: int
    line: str
    fields: JsonObject
    extent: tuple[str, int, int] | None = None


@runtime_checkable
class Showing(Protocol):
    """A writer that provides a live view of the run."""

    def board(self, running: Sequence[Running], n_running: int) -> StatusTable:
        """Return the table. `running` are the first of the `n_running` running units."""
        ...


@runtime_checkable
class Watching(Protocol):
    """A writer that keeps the state of a running run in its files."""

    def watch(self, state: str, reason: str) -> None:
        """Note the run's current state and its reason; called before each `refresh`."""
        ...


@dataclass(frozen=True, slots=True)
class FailedRun:
    """Consequences of a run that failed, because no worker could start it or because of a unit.

    `recovery_hint` says how to continue. `refusal` is the fault of the input or the configuration, if that is the
    cause: the command then ends as if its check had found it. `without_results` means that the files hold nothing worth
    keeping: OtherRunError of `check` then starts another run in its place (`InputReader.without_results`).
    """

    recovery_hint: str = "when that is mended, the same command goes on with them"
    refusal: str = ""
    without_results: bool = False


@runtime_checkable
class SnapshotMaker(Protocol):
    """A workload whose items leave snapshots from which other runs can start."""

    def snapshot_of(self, entry: CommitEntry) -> JsonObject | None:
        """Return the result of an entry that left one: `snapshot`, its id in hex, `step`, `size` in bytes, and whatever
        else `FoundSnapshot.result` has."""
        ...


@runtime_checkable
class Priced(Protocol):
    """A workload whose configuration may have prices of its units."""

    def cost(self, config: JsonObject, totals: Totals) -> str:
        """Return the cost of a run so far as text, or "" without prices. Of `totals`, `done`, `units_in` and
        `units_out` are known. Raises UNEXPECTED as `Workload.digest` does."""
        ...


Settings = TypeVar("Settings", bound=BaseModel)
Found = TypeVar("Found", bound=Checked)


class Workload(ABC, Generic[Settings, Found]):
    """A workload. It is made once per process, without arguments. Class variables without a value must be set."""

    name: ClassVar[str]
    help: ClassVar[str] = ""
    """A sentence for `rollout --help`, for a workload whose package has no `commands`."""
    settings: ClassVar[type[BaseModel]]
    """The model of the configuration file."""
    sections: ClassVar[frozenset[str]] = frozenset()
    """Top-level tables by which `rollout plan` recognises a file of this workload; empty if it has no files."""
    details: ClassVar[str] = ""
    """Paragraphs for the help of its command `rollout NAME run --config FILE`, if its package has no `commands`
    (`registered`)."""

    unit: ClassVar[str] = "rows"
    """Plural name of its units in progress and summaries."""
    endless: ClassVar[bool] = False
    """Whether its items run until their run is ended, so that there is no share of completed ones."""
    measure: ClassVar[str] = ""
    """What `units_out` of an entry counts, such as tokens; empty for nothing of interest to users."""
    carries: ClassVar[tuple[str, ...]] = ()
    """Sections of the configuration that follow from the rows, if rows added to the input of a completed run can run by
    themselves (`--extend`). Its units are the rows of [input], and the lines of its files are in their order or in
    order of arrival."""
    finishes_running: ClassVar[bool] = False
    """Whether the first Ctrl-C only stops starting units, and waits for running ones, which are long and expensive."""
    result_files: ClassVar[tuple[str, ...]]
    """Every file that a run may write to its output directory, the most important first, including `summary.json`."""

    output_of_rows: ClassVar[Mapping[str, JsonObject]] = MappingProxyType({})
    """Keys of [output] that fit an input whose first row has a given key, for files written without the run's
    configuration file."""
    directory_key: ClassVar[str] = DIRECTORY_KEY
    """The key of the settings that names `directory`."""
    makes_way: ClassVar[bool] = False
    """Whether a run that failed before any unit had a result is replaced by one with other settings in the same
    directory."""
    free: ClassVar[frozenset[str]] = frozenset({"output", "workers"})
    """Sections that change no result and do not belong to the run: a resumed run may change them."""

    # ---- the settings

    @property
    def recorded(self) -> Mapping[str, str]:
        """Dotted keys that change how, not what: a resumed run keeps its value, and the user is told. They are declared
        in `settings` (`rollout.config.declared`)."""
        return on_resume(self.settings, "keep")

    @property
    def changeable(self) -> Mapping[str, str]:
        """Dotted keys of limits and the like, and how a user sets each: a resumed run applies the new value to units
        without a result (`limits`). They are declared like `recorded` ones."""
        return on_resume(self.settings, "follow")

    @property
    def changeable_parts(self) -> Mapping[str, frozenset[str]]:
        """The entries that may change of tables that are partly `changeable`, by dotted key."""
        return parts_that_follow(self.settings)

    def directory(self, settings: Settings) -> Path:
        """Return the output directory: `[output] dir`, unless a workload has another."""
        return _output_of(settings).directory

    def bucket(self, settings: Settings) -> BucketUrl | None:
        """Return the bucket of the output, if it is in one; `directory` is then where files are collected on this
        machine (`rollout.workloads.staging`)."""
        output = getattr(settings, "output", None)
        return output.bucket if isinstance(output, OutputPlace) else None

    def workers(self, settings: Settings) -> int:
        """Return the number of workers of an embedded cluster: `[workers] count`, or one."""
        section = getattr(settings, "workers", None)
        return section.count if isinstance(section, WorkersSection) else 1

    @property
    def executors(self) -> tuple[str, ...]:
        """Executors of its items, the only ones that these workers load; empty means all installed ones."""
        return ()

    def load(self, path: Path | None, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Settings:
        """Return the settings of a file; None means `overrides` alone, as in `load_settings`. Raises ConfigError with
        all faults."""
        return cast("Settings", load_settings(self.settings, path, overrides))

    def works_here(self) -> None:
        """Note that its workers start on this machine, so that `load` and `check` verify what those need."""
        return

    def check_host(self, settings: Settings) -> None:
        """Raise ConfigError if local workers could not do the work, for example because a package is missing."""
        return

    def host_notes(self, settings: Settings) -> list[str]:
        """Return notes for the user about this host, if workers start on it."""
        return []

    # ---- input to items

    @abstractmethod
    def check(self, settings: Settings, reading: InputReader) -> Found:
        """Read all of the input once and find every fault. Writes nothing. Blocking.

        Raises ConfigError or InputError with all faults, each as `file:line: what, and what would be right`.
        """

    @abstractmethod
    def plan(self, checked: Found, config: JsonObject, start: int) -> Iterator[NewItem]:
        """Yield items from seq `start` on, in order, lazily; seq n is unit n, counted from 0. Runs in a thread.

        `config` is the run's own, which on resume may be older than `checked.config`. `checked.lines(start)` raises
        InputChangedError if the input has changed since the check.
        """

    def item_factory(self, checked: Found, config: JsonObject) -> Callable[[Line], NewItem]:
        """Return a function that makes an item of a row from a queue (`Checked.queue`); its `file` names the message
        and its `index` is the seq. It raises InputError if it is not a row. The item's id identifies what it does, not
        its place. Called in a thread."""
        raise NotImplementedError

    def found(self, checked: Found, key: str, snapshot: FoundSnapshot) -> None:
        """Use a snapshot that the table `key` of `checked.config` names. Raises ConfigError if it is unsuitable."""
        lookup(checked.config, key).update(snapshot=snapshot.id, content_id=snapshot.id)

    def finalize(self, checked: Found) -> None:
        """Compute what depends on snapshots, now that every one that `checked.config` names is known."""
        return

    def limits(self, config: JsonObject) -> ItemLimits:
        """Return the limits of each item of a run with this configuration. Called if something is `changeable`."""
        raise NotImplementedError

    def spec(self, run_id: str, config: JsonObject) -> RunSpec:
        """Return the run to open, without the free sections, so that opening it again compares equal."""
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
        """Turn `checked` into the work that is left for a run after that of `directory`, which is over and whose
        results are in the files; `total` may be 0. Returns a note for the user. `config` is that of the run that is
        over. `tell` reports progress. What it writes counts once the other run has the directory. Blocking.

        By default that is the rows added to the input, and those that failed, as `checked.retry` says.
        """
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
        """Write what is made once of a completed or failed run whose files are written, unless it exists, and return
        the paths. Each later command calls it again for a completed run, because an earlier one may have been
        interrupted.

        `config` is the run's, with the current free sections. `tell` is for the user.
        """
        return await asyncio.to_thread(self.derive, config, directory) if summary["state"] == "completed" else []

    def derive(self, config: JsonObject, directory: Path) -> list[str]:
        """Write, like `finished`, what is made of the result files alone. Blocking."""
        return []

    # ---- for people

    def item_input(self, payload: bytes) -> tuple[Any, str]:
        """Return the input of an item as users know it, and its origin (`file:line`), "" if unknown. Raises any of
        UNEXPECTED if the bytes are of another workload."""
        bad = invalid_of(payload)
        return self.row_input(payload) if bad is None else (bad.input, f"{bad.file}:{bad.line}")

    def row_input(self, payload: bytes) -> tuple[Any, str]:
        """Return the same for an item that is not an `invalid_item`."""
        return json.loads(payload), ""

    def item_output(self, data: bytes) -> Any:
        """Return the result of an item as users know it. Raises UNEXPECTED as `item_input` does."""
        return parse_result(data, finite=False)

    def digest(self, config: JsonObject) -> Digest | None:
        """Return the view of a run for the live page and reports, besides its rows. None means that its results are
        rows, which may be many and need no summary. Raises UNEXPECTED if the configuration is of another workload."""
        return None

    def item_parts(self, config: JsonObject, payload: bytes | None, result: bytes | None) -> Sequence[Part]:
        """Return what to show of an item besides its input and output, from its `payload` and its `result`, None if not
        wanted. `config` is its run's. Raises UNEXPECTED as `item_input` does. Blocking."""
        return ()

    def outcome(self, summary: JsonObject) -> str:
        """Describe the result of a run with this summary in a line; empty means the number of completed units and their
        rate."""
        return ""

    def failed_for_good(self, summary: JsonObject) -> int:
        """Return how many units have a line in errors.jsonl and are not invalid."""
        units = summary[self.unit]
        return units["failed"] - units["invalid"]

    def see_also(self, directory: Path) -> str:
        """Return the command that shows the results of the run in `directory`, or ""."""
        return ""

    def failed(self, summary: JsonObject) -> FailedRun:
        """Return the consequences of a run that failed with this summary."""
        return FailedRun()

    def exit_code(self, summary: JsonObject) -> int:
        """Return the exit code for a run completed with this summary: 0 if it did its work."""
        units = summary[self.unit]
        return 0 if units["completed"] > 0 or units["committed"] == 0 else 1

    def remarks(self, entry: CommitEntry) -> Iterable[tuple[str, str, JsonObject]]:
        """Yield (event, text, its fields) for the user about an entry of the commit log as it arrives."""
        return ()

    def describe(self, settings: Settings, checked: Found) -> list[str]:
        """Return lines of `rollout plan`: what a run of this configuration would do."""
        *files, last = self.result_files
        made = f"{', '.join(files)} and {last}" if files else last
        return [f"writes {made} of {of_unit(checked.total, self.unit)} to {self.directory(settings)}"]

    def dry_run(self, settings: Settings, checked: Found) -> JsonObject:
        """Return fields of the event of `--dry-run`."""
        invalid = {"invalid": checked.invalid} if checked.invalid else {}
        return {self.unit: checked.total, "workers": self.workers(settings), **invalid}

    def describe_workers(self, settings: Settings) -> str:
        """Return a line for `describe`."""
        return f"workers when no coordinator is named: {self.workers(settings)}"

    def idles(self, note: str) -> bool:
        """Return whether a unit with this last note is idle, so that the first Ctrl-C need not wait for it."""
        return False

    def warnings(self, settings: Settings) -> list[str]:
        """Return warnings of a dry run about what is not a fault."""
        return []

    def another_run(self, run: str, changes: Sequence[str]) -> str:
        """Say how to start a run in place of `run` (a short id), whose settings have the `changes`."""
        return f"by naming another {self.directory_key}"

    def describe_change(self, section: str, old: JsonObject, new: JsonObject) -> list[str] | None:
        """Return a line for each change in `section` of a run's configuration; empty if nothing relevant changed.

        Returns None for an ordinary section, whose keys are compared one by one.
        """
        return None


def _left_out(report: InputReport) -> tuple[str, ...]:
    """Return notes about unusable rows in a run that continues without them."""
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
    """Check everything that can be checked without a cluster and an engine. Leaves nothing behind. Raises ConfigError
    or InputError.

    `tell` reports waiting.
    """
    with checked_here(workload, settings, tell=tell) as checked:
        return checked


@contextmanager
def checked_here(
    workload: Workload[Settings, Found], settings: Settings, *, tell: Callable[[str], None]
) -> Generator[Found]:
    """Do what `check_only` does; rows can be read inside the block."""
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
    """Return [cloud] of a configuration; without one, clouds are reached by the providers' usual credentials."""
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
    """Why a unit has no result. `code` is stable, `message` is for users."""

    code: str
    message: str


def unsuccessful(entry: CommitEntry, unit: str = "row") -> Unsuccessful:
    """Return why an entry's outcome is not DONE."""
    if entry.failure is not None:
        return Unsuccessful(entry.failure.code, entry.failure.message)
    code = _OUTCOMES[entry.outcome]
    return Unsuccessful(code, f"the {unit} was {code}")
