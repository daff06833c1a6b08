from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_INIT: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_FENCED: _ClassVar[WorkerState]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_INIT: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_FENCED: WorkerState

class BeatUp(_message.Message):
    __slots__ = ("epoch", "incarnation", "state", "number", "load", "running", "backlog", "cpu_percent", "memory_mib")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MIB_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: str
    state: WorkerState
    number: int
    load: float
    running: int
    backlog: int
    cpu_percent: float
    memory_mib: int
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., number: _Optional[int] = ..., load: _Optional[float] = ..., running: _Optional[int] = ..., backlog: _Optional[int] = ..., cpu_percent: _Optional[float] = ..., memory_mib: _Optional[int] = ...) -> None: ...

class BeatAck(_message.Message):
    __slots__ = ("epoch", "number", "known", "coordinators")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    known: bool
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., known: bool = ..., coordinators: _Optional[_Iterable[str]] = ...) -> None: ...
