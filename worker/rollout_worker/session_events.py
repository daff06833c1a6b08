"""What happens to a worker's session, and what it asks of the driver. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.model.item import Blob, Failure
from rollout.wire.v1 import work_pb2

from rollout_worker.attempts import AttemptKey, Held, Plan

# ---- events


@dataclass(slots=True)
class StreamUp:
    """A Work stream is open; `session` is its fresh ULID."""

    session: str


@dataclass(slots=True)
class StreamDown:
    pass


@dataclass(slots=True)
class Frame:
    """A frame of the coordinator, its epoch checked."""

    frame: work_pb2.WorkDown


@dataclass(slots=True)
class Acknowledged:
    """The coordinator has read what this worker sent at `sent_at` (the clock of `now`)."""

    sent_at: float


@dataclass(slots=True)
class ChildReady:
    child: int
    width: int  # attempts it runs at once
    ahead: int = 0  # more that it takes before their turn


@dataclass(slots=True)
class ChildFailed:
    """It ran, but its executor could not be started."""

    child: int
    failure: Failure


@dataclass(slots=True)
class ChildEnded:
    child: int
    reason: str
    code: str = ""  # of the failure of what it ran, where more is known than that it ended


@dataclass(slots=True)
class ChildResults:
    child: int
    group: work_pb2.ResultGroup


@dataclass(slots=True)
class ChildSpawned:
    child: int
    spawn: work_pb2.Spawn


@dataclass(slots=True)
class ChildWaits:
    child: int
    waiting: work_pb2.Waiting


@dataclass(slots=True)
class ChildProgress:
    child: int
    key: AttemptKey
    note: str
    figures: bytes = b""


@dataclass(slots=True)
class ChildHindered:
    """Something outside keeps an attempt from going on; an empty message: no longer. `returned`: it is given back."""

    child: int
    key: AttemptKey
    failure: Failure
    returned: bool


@dataclass(slots=True)
class ChildRelays:
    """What an attempt says as a replica: announce, withdraw or said."""

    child: int
    key: AttemptKey
    frame: work_pb2.WorkUp


@dataclass(slots=True)
class Input:
    key: AttemptKey
    payload: Blob  # a slice: of an object that is in the cache
    predecessor: bytes | None


@dataclass(slots=True)
class Fetched:
    inputs: list[Input]


@dataclass(slots=True)
class FetchFailed:
    key: AttemptKey
    failure: Failure


@dataclass(slots=True)
class ChildReturned:
    """Of the attempts it was asked to give back, those that it had not begun."""

    child: int
    keys: list[AttemptKey]


@dataclass(slots=True)
class Stored:
    key: AttemptKey
    blob: Blob


@dataclass(slots=True)
class StoreFailed:
    key: AttemptKey
    failure: Failure


@dataclass(slots=True)
class Drain:
    """Stop pulling, finish what fits in `budget_s`, leave. Again with 0: at once. `preempted`: the machine is being
    taken away."""

    reason: str
    budget_s: float
    preempted: bool = False


@dataclass(slots=True)
class Flush:
    """Send what has gathered."""


@dataclass(slots=True)
class Tick:
    """Time passed."""


Event = (
    StreamUp | StreamDown | Frame | Acknowledged | ChildReady | ChildFailed | ChildEnded | ChildResults | ChildSpawned
    | ChildWaits | ChildProgress | ChildHindered | ChildReturned | ChildRelays | Fetched | FetchFailed | Stored
    | StoreFailed | Drain | Flush | Tick
)  # fmt: skip

# ---- actions


@dataclass(slots=True)
class Send:
    """On the Work stream; the driver stamps epoch and session."""

    frame: work_pb2.WorkUp


@dataclass(slots=True)
class Relay:
    """On the Work stream, behind all that is sent: no result waits for it."""

    frame: work_pb2.WorkUp


@dataclass(slots=True)
class StartChild:
    child: int
    plan: Plan
    devices: tuple[str, ...] | None = None  # all that it may see; None: this worker has no list of its devices


@dataclass(slots=True)
class StopChild:
    """`kill`: at once; else it closes its executor first, within a grace time. Answered by ChildEnded."""

    child: int
    kill: bool


@dataclass(slots=True)
class KillAt:
    """Kill it at `at` (the clock of `now`), whatever becomes of this daemon meanwhile; 0: at no time any more."""

    child: int
    at: float


@dataclass(slots=True)
class Deliver:
    child: int
    attempts: list[Held]


@dataclass(slots=True)
class CancelIn:
    child: int
    keys: list[AttemptKey]


@dataclass(slots=True)
class RecallIn:
    """Give back those that have not begun; answered by ChildReturned."""

    child: int
    keys: list[AttemptKey]


@dataclass(slots=True)
class LeaveIn:
    """This worker leaves in `budget_s` seconds: what it runs may hand over what it has done."""

    child: int
    budget_s: float


@dataclass(slots=True)
class HoldIn:
    """This worker is fenced, or no longer: what it runs begins nothing that others may be beginning now."""

    child: int
    on: bool


@dataclass(slots=True)
class PassChildren:
    """Results of a parent's children, to the process that runs it."""

    child: int
    results: work_pb2.ChildResults


@dataclass(slots=True)
class ResumeIn:
    child: int
    key: AttemptKey


@dataclass(slots=True)
class RelayIn:
    """To a replica in that process: heard or hung_up."""

    child: int
    frame: work_pb2.WorkDown


@dataclass(slots=True)
class Fetch:
    """Answered by Fetched or FetchFailed."""

    held: Held


@dataclass(slots=True)
class Store:
    """Make `data` an object; answered by Stored or StoreFailed."""

    key: AttemptKey
    data: bytes


@dataclass(slots=True)
class DropStream:
    """Open another Work stream: its Hello reconciles."""

    reason: str


@dataclass(slots=True)
class Emit:
    event: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Exit:
    """The incarnation is over: `drained` or `orphaned`."""

    how: str


Action = (
    Send | Relay | StartChild | StopChild | KillAt | Deliver | CancelIn | RecallIn | LeaveIn | HoldIn | PassChildren
    | ResumeIn | RelayIn | Fetch | Store | DropStream | Emit | Exit
)  # fmt: skip
