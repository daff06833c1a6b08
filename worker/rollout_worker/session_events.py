"""Events of a worker's session, and the actions it requests of the driver. Pure values."""

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
    """A frame of the coordinator whose epoch was checked."""

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
    """The child ran, but its executor could not be started."""

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
    """Something external blocks an attempt, or no longer if the message is empty. `returned` says that it is given
    back."""

    child: int
    key: AttemptKey
    failure: Failure
    returned: bool


@dataclass(slots=True)
class ChildRelays:
    """An attempt speaks as a replica: announce, withdraw or said."""

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
    """Attempts that the child was asked to return and had not begun."""

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
    """Stop pulling, finish what fits in `budget_s`, leave. A second time, or 0, means at once. `preempted` says that
    the machine is being taken away."""

    reason: str
    budget_s: float
    preempted: bool = False


@dataclass(slots=True)
class Flush:
    """Send what was gathered."""


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
    """Send on the Work stream; the driver stamps epoch and session."""

    frame: work_pb2.WorkUp


@dataclass(slots=True)
class Relay:
    """Send on the Work stream after everything else, so that no result waits for it."""

    frame: work_pb2.WorkUp


@dataclass(slots=True)
class StartChild:
    child: int
    plan: Plan
    devices: tuple[str, ...] | None = None  # all that it may see; None: this worker has no list of its devices


@dataclass(slots=True)
class StopChild:
    """Stop a child: at once with `kill`, else it first closes its executor within a grace time. Answered by
    ChildEnded."""

    child: int
    kill: bool


@dataclass(slots=True)
class KillAt:
    """Kill the child at `at` (the clock of `now`), whatever happens to this daemon; 0 cancels that."""

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
    """Ask the child to return attempts that have not begun. Answered by ChildReturned."""

    child: int
    keys: list[AttemptKey]


@dataclass(slots=True)
class LeaveIn:
    """Tell the child that this worker leaves in `budget_s` seconds, so that attempts may hand over what they have
    done."""

    child: int
    budget_s: float


@dataclass(slots=True)
class HoldIn:
    """Tell the child that this worker is fenced, or no longer: it begins nothing that others may be beginning."""

    child: int
    on: bool


@dataclass(slots=True)
class PassChildren:
    """Pass results of a parent's children to the process that runs it."""

    child: int
    results: work_pb2.ChildResults


@dataclass(slots=True)
class ResumeIn:
    child: int
    key: AttemptKey


@dataclass(slots=True)
class RelayIn:
    """Pass a frame (heard or hung_up) to a replica in that process."""

    child: int
    frame: work_pb2.WorkDown


@dataclass(slots=True)
class Fetch:
    """Fetch an input. Answered by Fetched or FetchFailed."""

    held: Held


@dataclass(slots=True)
class Store:
    """Store `data` as an object. Answered by Stored or StoreFailed."""

    key: AttemptKey
    data: bytes


@dataclass(slots=True)
class DropStream:
    """Open another Work stream, whose Hello reconciles."""

    reason: str


@dataclass(slots=True)
class Emit:
    event: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Exit:
    """End the incarnation: `drained` or `orphaned`."""

    how: str


Action = (
    Send | Relay | StartChild | StopChild | KillAt | Deliver | CancelIn | RecallIn | LeaveIn | HoldIn | PassChildren
    | ResumeIn | RelayIn | Fetch | Store | DropStream | Emit | Exit
)  # fmt: skip
