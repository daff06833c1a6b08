from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_DONE: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_SKIPPED: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_DONE: Outcome
OUTCOME_FAILED: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_SKIPPED: Outcome

class ObjectRef(_message.Message):
    __slots__ = ("object_id", "offset", "length")
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    object_id: bytes
    offset: int
    length: int
    def __init__(self, object_id: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class IndexedRef(_message.Message):
    __slots__ = ("index", "ref")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    index: int
    ref: ObjectRef
    def __init__(self, index: _Optional[int] = ..., ref: _Optional[_Union[ObjectRef, _Mapping]] = ...) -> None: ...

class ItemSpec(_message.Message):
    __slots__ = ("lane", "chain", "resources", "require_roles", "require_labels", "require_plugin", "affinity", "group", "priority", "timeout_ms", "max_attempts", "max_worker_lost", "fail_on_worker_lost", "exclusive", "pipelined", "not_before_ms", "retry_backoff_ms", "cost", "executor")
    class ResourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RequireLabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LANE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_ROLES_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_PLUGIN_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    FAIL_ON_WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    PIPELINED_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    lane: str
    chain: str
    resources: _containers.ScalarMap[str, float]
    require_roles: _containers.RepeatedScalarFieldContainer[str]
    require_labels: _containers.ScalarMap[str, str]
    require_plugin: str
    affinity: str
    group: str
    priority: int
    timeout_ms: int
    max_attempts: int
    max_worker_lost: int
    fail_on_worker_lost: bool
    exclusive: bool
    pipelined: bool
    not_before_ms: int
    retry_backoff_ms: int
    cost: int
    executor: str
    def __init__(self, lane: _Optional[str] = ..., chain: _Optional[str] = ..., resources: _Optional[_Mapping[str, float]] = ..., require_roles: _Optional[_Iterable[str]] = ..., require_labels: _Optional[_Mapping[str, str]] = ..., require_plugin: _Optional[str] = ..., affinity: _Optional[str] = ..., group: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., max_attempts: _Optional[int] = ..., max_worker_lost: _Optional[int] = ..., fail_on_worker_lost: bool = ..., exclusive: bool = ..., pipelined: bool = ..., not_before_ms: _Optional[int] = ..., retry_backoff_ms: _Optional[int] = ..., cost: _Optional[int] = ..., executor: _Optional[str] = ...) -> None: ...

class AttemptKeys(_message.Message):
    __slots__ = ("log", "seq", "attempt")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    log: int
    seq: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, log: _Optional[int] = ..., seq: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplicaKey(_message.Message):
    __slots__ = ("log", "seq", "attempt")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    log: int
    seq: int
    attempt: int
    def __init__(self, log: _Optional[int] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("index", "code", "message", "retryable", "worker_lost", "retry_after_ms")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    index: int
    code: str
    message: str
    retryable: bool
    worker_lost: bool
    retry_after_ms: int
    def __init__(self, index: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ..., worker_lost: bool = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class ItemBatch(_message.Message):
    __slots__ = ("first_seq", "ids", "length", "data", "refs", "specs", "spec_index")
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFS_FIELD_NUMBER: _ClassVar[int]
    SPECS_FIELD_NUMBER: _ClassVar[int]
    SPEC_INDEX_FIELD_NUMBER: _ClassVar[int]
    first_seq: int
    ids: bytes
    length: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    refs: _containers.RepeatedCompositeFieldContainer[IndexedRef]
    specs: _containers.RepeatedCompositeFieldContainer[ItemSpec]
    spec_index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_seq: _Optional[int] = ..., ids: _Optional[bytes] = ..., length: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., refs: _Optional[_Iterable[_Union[IndexedRef, _Mapping]]] = ..., specs: _Optional[_Iterable[_Union[ItemSpec, _Mapping]]] = ..., spec_index: _Optional[_Iterable[int]] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("capacity", "roles", "labels", "plugins", "host", "version", "executors", "pid")
    class CapacityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    capacity: _containers.ScalarMap[str, float]
    roles: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.ScalarMap[str, str]
    plugins: _containers.RepeatedScalarFieldContainer[str]
    host: str
    version: str
    executors: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    def __init__(self, capacity: _Optional[_Mapping[str, float]] = ..., roles: _Optional[_Iterable[str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., plugins: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., executors: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ...) -> None: ...
