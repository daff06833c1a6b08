"""Events of the core. The driver makes them and calls `Core.handle(events, now)`.

`request` numbers are the driver's: the core answers each with exactly one `Reply`, maybe in a later step. A `session`
is one open Work stream; the core ignores frames of a session that is not its worker's newest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout.model.item import Blob, Failure, ItemLimits, ItemSpec, Key, Outcome
from rollout.model.run import RunSpec
from rollout.model.worker import Credit, Inventory


class Now(NamedTuple):
    """`mono` is monotonic seconds, for deadlines; `wall_ms` is the wall clock, for what is stored and shown."""

    mono: float
    wall_ms: int


@dataclass(slots=True)
class Keys:
    """Attempts of one log, columnar: (log, seq[i], attempt[i])."""

    log: int
    seq: list[int]
    attempt: list[int]


# ---- clients


@dataclass(slots=True)
class SubmitOpen:
    """Open a run, or find it again. The same run_id with another spec is a ConflictError that names the difference."""

    request: int
    spec: RunSpec
    by: str = ""  # who submits it, as people know them
    address: str = ""  # from where


@dataclass(slots=True)
class SubmitItems:
    """Submit contiguous items from `first_seq` of a run's root log. Existing ones must have the same ids."""

    request: int
    run_id: str
    first_seq: int
    ids: list[bytes]
    payloads: list[Blob]
    specs: tuple[ItemSpec, ...]
    spec_index: list[int] | None = None  # None: all specs[0]


@dataclass(slots=True)
class SubmitSeal:
    request: int
    run_id: str
    count: int


@dataclass(slots=True)
class RunCommand:
    request: int
    run_id: str
    verb: str  # pause | resume | kill | continue | priority
    reason: str = ""
    priority: int = 0
    by: str = ""  # who orders it, as people know them; empty: the command that submitted the run


@dataclass(slots=True)
class RunDelete:
    """Delete an ended run, or any with `force` (it is killed first)."""

    request: int
    run_id: str
    force: bool = False


@dataclass(slots=True)
class RunLimits:
    """Set other limits for the run's own items without a result, and the configuration with them."""

    request: int
    run_id: str
    config: bytes
    limits: ItemLimits


@dataclass(slots=True)
class ItemCancel:
    """End one item without a result."""

    request: int
    run_id: str
    place: tuple[int, ...]  # its seq; of a child item: its parent's place, then its ordinal
    reason: str = ""
    by: str = ""  # who orders it, as people know them


# ---- workers


@dataclass(slots=True)
class WorkerHello:
    session: str
    incarnation: str
    host_id: str
    inventory: Inventory
    credit: Credit
    held: list[Keys] = field(default_factory=list[Keys])
    started: list[Keys] = field(default_factory=list[Keys])
    unacknowledged: list[Keys] = field(default_factory=list[Keys])
    draining: bool = False
    preempted: bool = False  # its machine is being taken away
    address: str = ""  # from where it connected


@dataclass(slots=True)
class WorkerGone:
    """The Work stream broke. Not a failure by itself: deadlines decide."""

    session: str


@dataclass(slots=True)
class WorkerGoodbye:
    session: str
    reason: str


@dataclass(slots=True)
class WorkerLeaving:
    """A worker drains by itself. `preempted` says that its machine is being taken away."""

    session: str
    reason: str
    preempted: bool = False


@dataclass(slots=True)
class WorkerBeat:
    incarnation: str
    host_id: str
    read_at: float  # Now.mono when the frame was read
    state: str = "ready"
    load: float = 0.0
    running: int = 0
    cpu_percent: float = 0.0
    memory_mib: int = 0


@dataclass(slots=True)
class WorkerCredit:
    session: str
    credit: Credit


@dataclass(slots=True)
class WorkerStarted:
    session: str
    keys: list[Keys]


@dataclass(slots=True)
class ResultGroup:
    """Results of one log, columnar."""

    log: int
    seq: list[int]
    attempt: list[int]
    outcome: list[Outcome] | None  # None: all DONE
    data: list[Blob]
    failures: dict[int, Failure]  # by index
    duration_ms: list[int]
    units_in: list[int] | None = None
    units_out: list[int] | None = None
    keeps: dict[int, tuple[bytes, ...]] = field(default_factory=dict[int, tuple[bytes, ...]])  # by index


@dataclass(slots=True)
class WorkerResults:
    session: str
    groups: list[ResultGroup]


@dataclass(slots=True)
class WorkerReleased:
    session: str
    keys: list[Keys]
    reason: str


@dataclass(slots=True)
class CannotStart:
    """What a worker cannot start for a run. With `limits`, this applies only to items that ask for so much; None means
    all."""

    run_id: str
    executor: str
    limits: tuple[int, int] | None  # gpus, memory in MiB
    code: str
    message: str
    times: int
    final: bool  # another try is not expected to help
    retry_in: float  # seconds


@dataclass(slots=True)
class WorkerCauses:
    """All causes of a worker."""

    session: str
    causes: list[CannotStart]


@dataclass(slots=True)
class WorkerConfirm:
    session: str
    revoke_id: int
    given_up: list[Keys]
    kept: list[Keys]


@dataclass(slots=True)
class WorkerSpawn:
    session: str
    parent: Key
    attempt: int
    first_ordinal: int
    ids: list[bytes]
    payloads: list[Blob]
    specs: tuple[ItemSpec, ...]
    spec_index: list[int] | None
    seal: bool
    missing: str = ""  # why its items cannot be taken: objects that are not there
    keeps: tuple[bytes, ...] = ()  # objects that stay for its children
    lets_go: tuple[bytes, ...] = ()


@dataclass(slots=True)
class WorkerWaiting:
    """A parent waits for children. `holds` says that it works meanwhile and keeps its slot."""

    session: str
    parent: Key
    attempt: int
    from_child: int
    holds: bool = False


@dataclass(slots=True)
class WorkerProgress:
    """Progress of attempts, for people and for programs."""

    session: str
    keys: list[Keys]
    note: str
    figures: bytes = b""


@dataclass(slots=True)
class WorkerCommand:
    """An operator's order for one worker: drain | reload | log-level."""

    request: int
    incarnation: str
    verb: str
    argument: str = ""
    by: str = ""  # who orders it, as people know them


# ---- the driver's own


@dataclass(slots=True)
class PendingItem:
    """A row read back from the ledger, with the history of its attempts."""

    seq: int
    id: bytes
    spec: int  # index into the run's spec table
    payload: Blob
    attempts: int = 0  # highest attempt number so far
    failures: int = 0
    losses: int = 0
    not_before_ms: int = 0
    delay_ms: int = 0  # the longest that any of its attempts was delayed
    failed_on: str = ""  # worker of the last attempt that failed
    failed_by: str = ""  # its error code


@dataclass(slots=True)
class Loaded:
    """Answer to a `Load`. `end` says that the log holds no further submitted row without a result."""

    load_id: int
    log: int
    items: list[PendingItem]
    next_seq: int
    end: bool


@dataclass(slots=True)
class IdsLoaded:
    load_id: int
    log: int
    first_seq: int
    ids: list[bytes]


@dataclass(slots=True)
class ResultsLoaded:
    load_id: int
    log: int
    first_seq: int
    seq: list[int]
    outcome: list[Outcome]
    spec: list[int]
    data: list[Blob]
    failures: dict[int, Failure]
    attempt: list[int]


@dataclass(slots=True)
class RunLoaded:
    """Answer to LoadRun: a step.Snapshot of that one run whatever its state (no workers), or None if there is none."""

    load_id: int
    run_id: str
    snapshot: Any


@dataclass(slots=True)
class Tick:
    """Time passed. The driver sends one at `wake_at` and at least every heartbeat_interval / 2."""


RequestOfRun = SubmitItems | SubmitSeal | RunCommand | RunLimits | ItemCancel
Event = (
    SubmitOpen | SubmitItems | SubmitSeal | RunCommand | RunDelete | RunLimits | ItemCancel | WorkerHello
    | WorkerGone | WorkerGoodbye | WorkerLeaving
    | WorkerBeat | WorkerCredit | WorkerStarted | WorkerResults | WorkerReleased | WorkerCauses
    | WorkerConfirm | WorkerSpawn | WorkerWaiting | WorkerProgress | WorkerCommand | Loaded | IdsLoaded | ResultsLoaded
    | RunLoaded | Tick
)  # fmt: skip
