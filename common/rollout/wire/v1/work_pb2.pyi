from rollout.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkUp(_message.Message):
    __slots__ = ("epoch", "session", "hello", "credit", "started", "progress", "results", "released", "confirm", "spawn", "waiting", "goodbye", "causes", "leaving", "announce", "withdraw", "said", "then")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    SPAWN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session: str
    hello: Hello
    credit: Credit
    started: Started
    progress: Progress
    results: Results
    released: Released
    confirm: Confirm
    spawn: Spawn
    waiting: Waiting
    goodbye: Goodbye
    causes: Causes
    leaving: Leaving
    announce: Announce
    withdraw: Withdraw
    said: RelayData
    then: _containers.RepeatedCompositeFieldContainer[WorkUp]
    def __init__(self, epoch: _Optional[int] = ..., session: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., results: _Optional[_Union[Results, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., spawn: _Optional[_Union[Spawn, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., causes: _Optional[_Union[Causes, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., said: _Optional[_Union[RelayData, _Mapping]] = ..., then: _Optional[_Iterable[_Union[WorkUp, _Mapping]]] = ...) -> None: ...

class WorkDown(_message.Message):
    __slots__ = ("epoch", "session", "welcome", "assign", "accepted", "revoke", "cancel", "pause", "children", "resume", "ended", "heard", "hung_up", "then")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    HUNG_UP_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session: str
    welcome: Welcome
    assign: Assign
    accepted: Accepted
    revoke: Revoke
    cancel: Cancel
    pause: Pause
    children: ChildResults
    resume: Resume
    ended: RunEnded
    heard: RelayData
    hung_up: HungUp
    then: _containers.RepeatedCompositeFieldContainer[WorkDown]
    def __init__(self, epoch: _Optional[int] = ..., session: _Optional[str] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., children: _Optional[_Union[ChildResults, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., ended: _Optional[_Union[RunEnded, _Mapping]] = ..., heard: _Optional[_Union[RelayData, _Mapping]] = ..., hung_up: _Optional[_Union[HungUp, _Mapping]] = ..., then: _Optional[_Iterable[_Union[WorkDown, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("incarnation", "inventory", "held", "held_started", "unacknowledged", "credit", "draining", "preempted")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_STARTED_FIELD_NUMBER: _ClassVar[int]
    UNACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    inventory: _common_pb2.Inventory
    held: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    held_started: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    unacknowledged: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    credit: Credit
    draining: bool
    preempted: bool
    def __init__(self, incarnation: _Optional[str] = ..., inventory: _Optional[_Union[_common_pb2.Inventory, _Mapping]] = ..., held: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., held_started: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., unacknowledged: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., draining: bool = ..., preempted: bool = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("items", "bytes", "run_items")
    class RunItemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: int
    bytes: int
    run_items: _containers.ScalarMap[str, int]
    def __init__(self, items: _Optional[int] = ..., bytes: _Optional[int] = ..., run_items: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("run_id", "tokens_per_second", "running", "keys", "note", "figures")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    tokens_per_second: float
    running: int
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    note: str
    figures: bytes
    def __init__(self, run_id: _Optional[str] = ..., tokens_per_second: _Optional[float] = ..., running: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., note: _Optional[str] = ..., figures: _Optional[bytes] = ...) -> None: ...

class ResultGroup(_message.Message):
    __slots__ = ("log", "seq", "attempt", "outcome", "length", "data", "refs", "errors", "duration_ms", "units_in", "units_out", "kept")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    UNITS_IN_FIELD_NUMBER: _ClassVar[int]
    UNITS_OUT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    log: int
    seq: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    outcome: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    length: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    refs: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexedRef]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorInfo]
    duration_ms: _containers.RepeatedScalarFieldContainer[int]
    units_in: _containers.RepeatedScalarFieldContainer[int]
    units_out: _containers.RepeatedScalarFieldContainer[int]
    kept: _containers.RepeatedCompositeFieldContainer[Kept]
    def __init__(self, log: _Optional[int] = ..., seq: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., outcome: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., length: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., refs: _Optional[_Iterable[_Union[_common_pb2.IndexedRef, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.ErrorInfo, _Mapping]]] = ..., duration_ms: _Optional[_Iterable[int]] = ..., units_in: _Optional[_Iterable[int]] = ..., units_out: _Optional[_Iterable[int]] = ..., kept: _Optional[_Iterable[_Union[Kept, _Mapping]]] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("index", "object_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OBJECT_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    object_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, index: _Optional[int] = ..., object_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Results(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[ResultGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[ResultGroup, _Mapping]]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("keys", "reason")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    reason: str
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("revoke_id", "given_up", "kept")
    REVOKE_ID_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    revoke_id: int
    given_up: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    kept: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    def __init__(self, revoke_id: _Optional[int] = ..., given_up: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., kept: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ...) -> None: ...

class Spawn(_message.Message):
    __slots__ = ("log", "seq", "attempt", "items", "seal", "keeps", "lets_go")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    LETS_GO_FIELD_NUMBER: _ClassVar[int]
    log: int
    seq: int
    attempt: int
    items: _common_pb2.ItemBatch
    seal: bool
    keeps: _containers.RepeatedScalarFieldContainer[bytes]
    lets_go: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, log: _Optional[int] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ..., items: _Optional[_Union[_common_pb2.ItemBatch, _Mapping]] = ..., seal: bool = ..., keeps: _Optional[_Iterable[bytes]] = ..., lets_go: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("log", "seq", "attempt", "from_child", "holds")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_CHILD_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    log: int
    seq: int
    attempt: int
    from_child: int
    holds: bool
    def __init__(self, log: _Optional[int] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ..., from_child: _Optional[int] = ..., holds: bool = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason", "preempted")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    preempted: bool
    def __init__(self, reason: _Optional[str] = ..., preempted: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("cluster", "keep", "drop", "resend", "accepted", "objects_addr", "max_frame_bytes")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_ADDR_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    keep: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    drop: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    resend: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    accepted: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    objects_addr: str
    max_frame_bytes: int
    def __init__(self, cluster: _Optional[str] = ..., keep: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., drop: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., resend: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., accepted: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., objects_addr: _Optional[str] = ..., max_frame_bytes: _Optional[int] = ...) -> None: ...

class RunContext(_message.Message):
    __slots__ = ("run_id", "workload", "config", "name")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    workload: str
    config: bytes
    name: str
    def __init__(self, run_id: _Optional[str] = ..., workload: _Optional[str] = ..., config: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class AssignGroup(_message.Message):
    __slots__ = ("log", "run", "parent_log", "parent_seq", "seq", "attempt", "ids", "length", "data", "refs", "specs", "spec_index", "predecessors", "isolate", "failures", "handoff", "losses")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class HandoffEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    class LossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    LOG_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    PARENT_LOG_FIELD_NUMBER: _ClassVar[int]
    PARENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    SPEC_INDEX_FIELD_NUMBER: _ClassVar[int]
    PREDECESSORS_FIELD_NUMBER: _ClassVar[int]
    ISOLATE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    log: int
    run: RunContext
    parent_log: int
    parent_seq: int
    seq: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    ids: bytes
    length: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    refs: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexedRef]
    specs: _containers.RepeatedCompositeFieldContainer[_common_pb2.ItemSpec]
    spec_index: _containers.RepeatedScalarFieldContainer[int]
    predecessors: _containers.RepeatedCompositeFieldContainer[Predecessor]
    isolate: _containers.RepeatedScalarFieldContainer[int]
    failures: _containers.ScalarMap[int, int]
    handoff: _containers.ScalarMap[int, bytes]
    losses: _containers.ScalarMap[int, int]
    def __init__(self, log: _Optional[int] = ..., run: _Optional[_Union[RunContext, _Mapping]] = ..., parent_log: _Optional[int] = ..., parent_seq: _Optional[int] = ..., seq: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., ids: _Optional[bytes] = ..., length: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., refs: _Optional[_Iterable[_Union[_common_pb2.IndexedRef, _Mapping]]] = ..., specs: _Optional[_Iterable[_Union[_common_pb2.ItemSpec, _Mapping]]] = ..., spec_index: _Optional[_Iterable[int]] = ..., predecessors: _Optional[_Iterable[_Union[Predecessor, _Mapping]]] = ..., isolate: _Optional[_Iterable[int]] = ..., failures: _Optional[_Mapping[int, int]] = ..., handoff: _Optional[_Mapping[int, bytes]] = ..., losses: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Predecessor(_message.Message):
    __slots__ = ("index", "seq", "data", "ref", "attempt")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    index: int
    seq: int
    data: bytes
    ref: _common_pb2.ObjectRef
    attempt: int
    def __init__(self, index: _Optional[int] = ..., seq: _Optional[int] = ..., data: _Optional[bytes] = ..., ref: _Optional[_Union[_common_pb2.ObjectRef, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[AssignGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[AssignGroup, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("accepted", "stale")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    stale: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    def __init__(self, accepted: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., stale: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("revoke_id", "keys")
    REVOKE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    revoke_id: int
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    def __init__(self, revoke_id: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("keys", "reason")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    reason: str
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("run_id", "deadline_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    deadline_ms: int
    def __init__(self, run_id: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class ChildResults(_message.Message):
    __slots__ = ("parent_log", "parent_seq", "from_child", "outcome", "length", "data", "refs", "errors", "complete")
    PARENT_LOG_FIELD_NUMBER: _ClassVar[int]
    PARENT_SEQ_FIELD_NUMBER: _ClassVar[int]
    FROM_CHILD_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    parent_log: int
    parent_seq: int
    from_child: int
    outcome: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    length: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    refs: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexedRef]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorInfo]
    complete: bool
    def __init__(self, parent_log: _Optional[int] = ..., parent_seq: _Optional[int] = ..., from_child: _Optional[int] = ..., outcome: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., length: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., refs: _Optional[_Iterable[_Union[_common_pb2.IndexedRef, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.ErrorInfo, _Mapping]]] = ..., complete: bool = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("log", "seq", "attempt")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    log: int
    seq: int
    attempt: int
    def __init__(self, log: _Optional[int] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class RunEnded(_message.Message):
    __slots__ = ("run_id", "state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: str
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class Causes(_message.Message):
    __slots__ = ("causes",)
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    causes: _containers.RepeatedCompositeFieldContainer[CannotStart]
    def __init__(self, causes: _Optional[_Iterable[_Union[CannotStart, _Mapping]]] = ...) -> None: ...

class CannotStart(_message.Message):
    __slots__ = ("run_id", "executor", "any_resources", "gpus", "memory_mib", "code", "message", "times", "final", "retry_in_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    ANY_RESOURCES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MIB_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    RETRY_IN_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    executor: str
    any_resources: bool
    gpus: int
    memory_mib: int
    code: str
    message: str
    times: int
    final: bool
    retry_in_ms: int
    def __init__(self, run_id: _Optional[str] = ..., executor: _Optional[str] = ..., any_resources: bool = ..., gpus: _Optional[int] = ..., memory_mib: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., times: _Optional[int] = ..., final: bool = ..., retry_in_ms: _Optional[int] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("run_id", "replica", "engine")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    replica: _common_pb2.ReplicaKey
    engine: str
    def __init__(self, run_id: _Optional[str] = ..., replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., engine: _Optional[str] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("replica", "draining")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.ReplicaKey
    draining: bool
    def __init__(self, replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., draining: bool = ...) -> None: ...

class RelayData(_message.Message):
    __slots__ = ("replica", "channel", "data", "more")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.ReplicaKey
    channel: int
    data: bytes
    more: bool
    def __init__(self, replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., channel: _Optional[int] = ..., data: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class HungUp(_message.Message):
    __slots__ = ("replica", "channel")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.ReplicaKey
    channel: int
    def __init__(self, replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., channel: _Optional[int] = ...) -> None: ...
