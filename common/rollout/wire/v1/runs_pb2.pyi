from rollout.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LaneConfig(_message.Message):
    __slots__ = ("name", "max_in_flight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_in_flight: int
    def __init__(self, name: _Optional[str] = ..., max_in_flight: _Optional[int] = ...) -> None: ...

class Policy(_message.Message):
    __slots__ = ("name", "options")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RunSpec(_message.Message):
    __slots__ = ("run_id", "workload", "name", "config", "order", "priority", "max_in_flight", "lanes", "policies", "pause_timeout_ms", "labels", "one_worker")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ONE_WORKER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    workload: str
    name: str
    config: bytes
    order: str
    priority: int
    max_in_flight: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneConfig]
    policies: _containers.RepeatedCompositeFieldContainer[Policy]
    pause_timeout_ms: int
    labels: _containers.ScalarMap[str, str]
    one_worker: bool
    def __init__(self, run_id: _Optional[str] = ..., workload: _Optional[str] = ..., name: _Optional[str] = ..., config: _Optional[bytes] = ..., order: _Optional[str] = ..., priority: _Optional[int] = ..., max_in_flight: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneConfig, _Mapping]]] = ..., policies: _Optional[_Iterable[_Union[Policy, _Mapping]]] = ..., pause_timeout_ms: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ..., one_worker: bool = ...) -> None: ...

class SubmitUp(_message.Message):
    __slots__ = ("epoch", "open", "items", "seal")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    open: RunSpec
    items: _common_pb2.ItemBatch
    seal: Seal
    def __init__(self, epoch: _Optional[int] = ..., open: _Optional[_Union[RunSpec, _Mapping]] = ..., items: _Optional[_Union[_common_pb2.ItemBatch, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class SubmitDown(_message.Message):
    __slots__ = ("epoch", "durable", "sealed", "status", "objects_addr", "coordinators")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_ADDR_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    durable: int
    sealed: bool
    status: RunStatus
    objects_addr: str
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., durable: _Optional[int] = ..., sealed: bool = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., objects_addr: _Optional[str] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("spec", "state", "reason", "submitted", "sealed", "cursor", "done", "failed", "cancelled", "skipped", "in_flight", "running", "attempts", "retried", "worker_lost", "stale", "units_in", "units_out", "created_ms", "updated_ms", "ended_ms", "survivors", "lanes", "root_log", "workers", "pausing", "waits", "causes", "rate", "units_rate", "ended_by", "invalid", "note", "figures", "figures_of_each", "busy_ms", "skips_rest")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    UNITS_IN_FIELD_NUMBER: _ClassVar[int]
    UNITS_OUT_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    UPDATED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    ROOT_LOG_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PAUSING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    UNITS_RATE_FIELD_NUMBER: _ClassVar[int]
    ENDED_BY_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    FIGURES_OF_EACH_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    SKIPS_REST_FIELD_NUMBER: _ClassVar[int]
    spec: RunSpec
    state: str
    reason: str
    submitted: int
    sealed: bool
    cursor: int
    done: int
    failed: int
    cancelled: int
    skipped: int
    in_flight: int
    running: int
    attempts: int
    retried: int
    worker_lost: int
    stale: int
    units_in: int
    units_out: int
    created_ms: int
    updated_ms: int
    ended_ms: int
    survivors: _containers.RepeatedCompositeFieldContainer[_common_pb2.AttemptKeys]
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    root_log: int
    workers: int
    pausing: bool
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    causes: _containers.RepeatedCompositeFieldContainer[Cause]
    rate: float
    units_rate: float
    ended_by: str
    invalid: int
    note: str
    figures: bytes
    figures_of_each: _containers.RepeatedScalarFieldContainer[bytes]
    busy_ms: int
    skips_rest: bool
    def __init__(self, spec: _Optional[_Union[RunSpec, _Mapping]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., submitted: _Optional[int] = ..., sealed: bool = ..., cursor: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., skipped: _Optional[int] = ..., in_flight: _Optional[int] = ..., running: _Optional[int] = ..., attempts: _Optional[int] = ..., retried: _Optional[int] = ..., worker_lost: _Optional[int] = ..., stale: _Optional[int] = ..., units_in: _Optional[int] = ..., units_out: _Optional[int] = ..., created_ms: _Optional[int] = ..., updated_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., survivors: _Optional[_Iterable[_Union[_common_pb2.AttemptKeys, _Mapping]]] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., root_log: _Optional[int] = ..., workers: _Optional[int] = ..., pausing: bool = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ..., causes: _Optional[_Iterable[_Union[Cause, _Mapping]]] = ..., rate: _Optional[float] = ..., units_rate: _Optional[float] = ..., ended_by: _Optional[str] = ..., invalid: _Optional[int] = ..., note: _Optional[str] = ..., figures: _Optional[bytes] = ..., figures_of_each: _Optional[_Iterable[bytes]] = ..., busy_ms: _Optional[int] = ..., skips_rest: bool = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("reason", "message", "items", "impossible")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    IMPOSSIBLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    items: int
    impossible: bool
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., items: _Optional[int] = ..., impossible: bool = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("name", "max_in_flight", "in_flight", "done", "failed", "consecutive_failures", "pruned", "pruned_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CONSECUTIVE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    PRUNED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_in_flight: int
    in_flight: int
    done: int
    failed: int
    consecutive_failures: int
    pruned: bool
    pruned_at: int
    def __init__(self, name: _Optional[str] = ..., max_in_flight: _Optional[int] = ..., in_flight: _Optional[int] = ..., done: _Optional[int] = ..., failed: _Optional[int] = ..., consecutive_failures: _Optional[int] = ..., pruned: bool = ..., pruned_at: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "cursor", "payloads", "status_only")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    STATUS_ONLY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    cursor: int
    payloads: bool
    status_only: bool
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., cursor: _Optional[int] = ..., payloads: bool = ..., status_only: bool = ...) -> None: ...

class WatchDown(_message.Message):
    __slots__ = ("epoch", "batch", "status", "coordinators")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    batch: CommitBatch
    status: RunStatus
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., batch: _Optional[_Union[CommitBatch, _Mapping]] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("from_cursor", "seq", "attempt", "outcome", "length", "data", "refs", "errors", "duration_ms", "accepted_ms", "workers", "worker_index", "ids", "payload_length", "payload_data", "payload_refs", "units_in", "units_out", "tries")
    FROM_CURSOR_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_MS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_DATA_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_REFS_FIELD_NUMBER: _ClassVar[int]
    UNITS_IN_FIELD_NUMBER: _ClassVar[int]
    UNITS_OUT_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    from_cursor: int
    seq: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    outcome: _containers.RepeatedScalarFieldContainer[_common_pb2.Outcome]
    length: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    refs: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexedRef]
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.ErrorInfo]
    duration_ms: _containers.RepeatedScalarFieldContainer[int]
    accepted_ms: _containers.RepeatedScalarFieldContainer[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    worker_index: _containers.RepeatedScalarFieldContainer[int]
    ids: bytes
    payload_length: _containers.RepeatedScalarFieldContainer[int]
    payload_data: bytes
    payload_refs: _containers.RepeatedCompositeFieldContainer[_common_pb2.IndexedRef]
    units_in: _containers.RepeatedScalarFieldContainer[int]
    units_out: _containers.RepeatedScalarFieldContainer[int]
    tries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, from_cursor: _Optional[int] = ..., seq: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., outcome: _Optional[_Iterable[_Union[_common_pb2.Outcome, str]]] = ..., length: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., refs: _Optional[_Iterable[_Union[_common_pb2.IndexedRef, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.ErrorInfo, _Mapping]]] = ..., duration_ms: _Optional[_Iterable[int]] = ..., accepted_ms: _Optional[_Iterable[int]] = ..., workers: _Optional[_Iterable[str]] = ..., worker_index: _Optional[_Iterable[int]] = ..., ids: _Optional[bytes] = ..., payload_length: _Optional[_Iterable[int]] = ..., payload_data: _Optional[bytes] = ..., payload_refs: _Optional[_Iterable[_Union[_common_pb2.IndexedRef, _Mapping]]] = ..., units_in: _Optional[_Iterable[int]] = ..., units_out: _Optional[_Iterable[int]] = ..., tries: _Optional[_Iterable[int]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "force", "failures")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    force: bool
    failures: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., force: bool = ..., failures: _Optional[int] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("epoch", "status", "objects_addr", "workers", "failures", "coordinators")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_ADDR_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    status: RunStatus
    objects_addr: str
    workers: _containers.RepeatedCompositeFieldContainer[RunWorker]
    failures: _containers.RepeatedCompositeFieldContainer[RunFailure]
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., objects_addr: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[RunWorker, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[RunFailure, _Mapping]]] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("epoch", "states", "limit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    states: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    def __init__(self, epoch: _Optional[int] = ..., states: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("epoch", "runs", "coordinators")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class CommandRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "verb", "reason", "priority", "own")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    verb: str
    reason: str
    priority: int
    own: bool
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., verb: _Optional[str] = ..., reason: _Optional[str] = ..., priority: _Optional[int] = ..., own: bool = ...) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "config", "timeout_ms", "max_attempts", "max_worker_lost", "retry_backoff_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    RETRY_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    config: bytes
    timeout_ms: int
    max_attempts: int
    max_worker_lost: int
    retry_backoff_ms: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., config: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., max_attempts: _Optional[int] = ..., max_worker_lost: _Optional[int] = ..., retry_backoff_ms: _Optional[int] = ...) -> None: ...

class CancelItemRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "place", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    place: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., place: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("epoch", "items", "objects_freed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FREED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    items: int
    objects_freed: int
    def __init__(self, epoch: _Optional[int] = ..., items: _Optional[int] = ..., objects_freed: _Optional[int] = ...) -> None: ...

class WorkersRequest(_message.Message):
    __slots__ = ("epoch", "all", "incarnation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    all: bool
    incarnation: str
    def __init__(self, epoch: _Optional[int] = ..., all: bool = ..., incarnation: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("incarnation", "inventory", "state", "in_flight", "running", "registered_ms", "last_seen_s", "reason", "load", "done", "causes", "cpu_percent", "memory_mib", "runs", "held", "used", "ended_ms", "host_id")
    class UsedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MIB_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    inventory: _common_pb2.Inventory
    state: str
    in_flight: int
    running: int
    registered_ms: int
    last_seen_s: float
    reason: str
    load: float
    done: int
    causes: _containers.RepeatedCompositeFieldContainer[Cause]
    cpu_percent: float
    memory_mib: int
    runs: _containers.RepeatedCompositeFieldContainer[WorkerRun]
    held: _containers.RepeatedCompositeFieldContainer[HeldAttempt]
    used: _containers.ScalarMap[str, float]
    ended_ms: int
    host_id: str
    def __init__(self, incarnation: _Optional[str] = ..., inventory: _Optional[_Union[_common_pb2.Inventory, _Mapping]] = ..., state: _Optional[str] = ..., in_flight: _Optional[int] = ..., running: _Optional[int] = ..., registered_ms: _Optional[int] = ..., last_seen_s: _Optional[float] = ..., reason: _Optional[str] = ..., load: _Optional[float] = ..., done: _Optional[int] = ..., causes: _Optional[_Iterable[_Union[Cause, _Mapping]]] = ..., cpu_percent: _Optional[float] = ..., memory_mib: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[WorkerRun, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[HeldAttempt, _Mapping]]] = ..., used: _Optional[_Mapping[str, float]] = ..., ended_ms: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class WorkersReply(_message.Message):
    __slots__ = ("epoch", "workers", "leader", "coordinators")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    leader: str
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., leader: _Optional[str] = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerCommandRequest(_message.Message):
    __slots__ = ("epoch", "incarnation", "verb", "argument")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: str
    verb: str
    argument: str
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., verb: _Optional[str] = ..., argument: _Optional[str] = ...) -> None: ...

class RunWorker(_message.Message):
    __slots__ = ("incarnation", "host", "in_flight", "running")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    host: str
    in_flight: int
    running: int
    def __init__(self, incarnation: _Optional[str] = ..., host: _Optional[str] = ..., in_flight: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class RunFailure(_message.Message):
    __slots__ = ("seq", "attempt", "code", "message", "worker", "host", "at_ms", "final")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: int
    code: str
    message: str
    worker: str
    host: str
    at_ms: int
    final: bool
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., worker: _Optional[str] = ..., host: _Optional[str] = ..., at_ms: _Optional[int] = ..., final: bool = ...) -> None: ...

class WorkerRun(_message.Message):
    __slots__ = ("run_id", "name", "workload", "in_flight", "running")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    name: str
    workload: str
    in_flight: int
    running: int
    def __init__(self, run_id: _Optional[str] = ..., name: _Optional[str] = ..., workload: _Optional[str] = ..., in_flight: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class HeldAttempt(_message.Message):
    __slots__ = ("run_id", "place", "attempt", "began_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BEGAN_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    place: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    began_ms: int
    def __init__(self, run_id: _Optional[str] = ..., place: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., began_ms: _Optional[int] = ...) -> None: ...

class ItemsRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "parent", "which", "from_seq", "limit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WHICH_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    parent: _containers.RepeatedScalarFieldContainer[int]
    which: str
    from_seq: int
    limit: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., parent: _Optional[_Iterable[int]] = ..., which: _Optional[str] = ..., from_seq: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ItemStatus(_message.Message):
    __slots__ = ("seq", "id", "state", "attempts", "worker", "at_ms", "duration_ms", "code", "message")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    id: bytes
    state: str
    attempts: int
    worker: str
    at_ms: int
    duration_ms: int
    code: str
    message: str
    def __init__(self, seq: _Optional[int] = ..., id: _Optional[bytes] = ..., state: _Optional[str] = ..., attempts: _Optional[int] = ..., worker: _Optional[str] = ..., at_ms: _Optional[int] = ..., duration_ms: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ItemsReply(_message.Message):
    __slots__ = ("epoch", "items", "next_seq", "end", "hosts")
    class HostsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    items: _containers.RepeatedCompositeFieldContainer[ItemStatus]
    next_seq: int
    end: bool
    hosts: _containers.ScalarMap[str, str]
    def __init__(self, epoch: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ItemStatus, _Mapping]]] = ..., next_seq: _Optional[int] = ..., end: bool = ..., hosts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ItemRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "place", "attempts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    place: _containers.RepeatedScalarFieldContainer[int]
    attempts: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., place: _Optional[_Iterable[int]] = ..., attempts: _Optional[int] = ...) -> None: ...

class AttemptStatus(_message.Message):
    __slots__ = ("attempt", "worker", "host", "began_ms", "ended_ms", "ending", "code", "message", "data", "data_ref", "units_in", "units_out")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BEGAN_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DATA_REF_FIELD_NUMBER: _ClassVar[int]
    UNITS_IN_FIELD_NUMBER: _ClassVar[int]
    UNITS_OUT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    worker: str
    host: str
    began_ms: int
    ended_ms: int
    ending: str
    code: str
    message: str
    data: bytes
    data_ref: _common_pb2.ObjectRef
    units_in: int
    units_out: int
    def __init__(self, attempt: _Optional[int] = ..., worker: _Optional[str] = ..., host: _Optional[str] = ..., began_ms: _Optional[int] = ..., ended_ms: _Optional[int] = ..., ending: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., data: _Optional[bytes] = ..., data_ref: _Optional[_Union[_common_pb2.ObjectRef, _Mapping]] = ..., units_in: _Optional[int] = ..., units_out: _Optional[int] = ...) -> None: ...

class ItemReply(_message.Message):
    __slots__ = ("epoch", "item", "payload", "payload_ref", "result", "result_ref", "has_result", "attempts", "children", "children_final", "objects_addr")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_REF_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESULT_REF_FIELD_NUMBER: _ClassVar[int]
    HAS_RESULT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FINAL_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_ADDR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    item: ItemStatus
    payload: bytes
    payload_ref: _common_pb2.ObjectRef
    result: bytes
    result_ref: _common_pb2.ObjectRef
    has_result: bool
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptStatus]
    children: int
    children_final: int
    objects_addr: str
    def __init__(self, epoch: _Optional[int] = ..., item: _Optional[_Union[ItemStatus, _Mapping]] = ..., payload: _Optional[bytes] = ..., payload_ref: _Optional[_Union[_common_pb2.ObjectRef, _Mapping]] = ..., result: _Optional[bytes] = ..., result_ref: _Optional[_Union[_common_pb2.ObjectRef, _Mapping]] = ..., has_result: bool = ..., attempts: _Optional[_Iterable[_Union[AttemptStatus, _Mapping]]] = ..., children: _Optional[int] = ..., children_final: _Optional[int] = ..., objects_addr: _Optional[str] = ...) -> None: ...

class AttemptsRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "parent", "after_seq", "after_attempt", "limit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    AFTER_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    parent: _containers.RepeatedScalarFieldContainer[int]
    after_seq: int
    after_attempt: int
    limit: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., parent: _Optional[_Iterable[int]] = ..., after_seq: _Optional[int] = ..., after_attempt: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ItemAttempt(_message.Message):
    __slots__ = ("seq", "attempt")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    attempt: AttemptStatus
    def __init__(self, seq: _Optional[int] = ..., attempt: _Optional[_Union[AttemptStatus, _Mapping]] = ...) -> None: ...

class AttemptsReply(_message.Message):
    __slots__ = ("epoch", "attempts", "end", "objects_addr")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_ADDR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    attempts: _containers.RepeatedCompositeFieldContainer[ItemAttempt]
    end: bool
    objects_addr: str
    def __init__(self, epoch: _Optional[int] = ..., attempts: _Optional[_Iterable[_Union[ItemAttempt, _Mapping]]] = ..., end: bool = ..., objects_addr: _Optional[str] = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("epoch", "text", "complete", "limit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    text: str
    complete: bool
    limit: int
    def __init__(self, epoch: _Optional[int] = ..., text: _Optional[str] = ..., complete: bool = ..., limit: _Optional[int] = ...) -> None: ...

class FoundRun(_message.Message):
    __slots__ = ("run_id", "workload", "name", "state", "created_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    workload: str
    name: str
    state: str
    created_ms: int
    def __init__(self, run_id: _Optional[str] = ..., workload: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., created_ms: _Optional[int] = ...) -> None: ...

class FindReply(_message.Message):
    __slots__ = ("epoch", "runs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    runs: _containers.RepeatedCompositeFieldContainer[FoundRun]
    def __init__(self, epoch: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[FoundRun, _Mapping]]] = ...) -> None: ...

class Cause(_message.Message):
    __slots__ = ("executor", "code", "message", "workers", "times", "first_ms", "last_ms", "everywhere", "run_id", "hosts")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    EVERYWHERE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    executor: str
    code: str
    message: str
    workers: _containers.RepeatedScalarFieldContainer[str]
    times: int
    first_ms: int
    last_ms: int
    everywhere: bool
    run_id: str
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, executor: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., workers: _Optional[_Iterable[str]] = ..., times: _Optional[int] = ..., first_ms: _Optional[int] = ..., last_ms: _Optional[int] = ..., everywhere: bool = ..., run_id: _Optional[str] = ..., hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class KeptRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "release")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    release: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., release: _Optional[_Iterable[int]] = ...) -> None: ...

class KeptEntry(_message.Message):
    __slots__ = ("seq", "object_id", "attempt")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    object_id: bytes
    attempt: int
    def __init__(self, seq: _Optional[int] = ..., object_id: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class KeptReply(_message.Message):
    __slots__ = ("epoch", "entries", "objects_freed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FREED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    entries: _containers.RepeatedCompositeFieldContainer[KeptEntry]
    objects_freed: int
    def __init__(self, epoch: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[KeptEntry, _Mapping]]] = ..., objects_freed: _Optional[int] = ...) -> None: ...
