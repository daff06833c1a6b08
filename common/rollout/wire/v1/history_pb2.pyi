from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutputLine(_message.Message):
    __slots__ = ("at_ms", "stream", "text", "log", "seq", "attempt", "left_out_lines", "left_out_bytes", "executor")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_LINES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    stream: str
    text: str
    log: int
    seq: int
    attempt: int
    left_out_lines: int
    left_out_bytes: int
    executor: str
    def __init__(self, at_ms: _Optional[int] = ..., stream: _Optional[str] = ..., text: _Optional[str] = ..., log: _Optional[int] = ..., seq: _Optional[int] = ..., attempt: _Optional[int] = ..., left_out_lines: _Optional[int] = ..., left_out_bytes: _Optional[int] = ..., executor: _Optional[str] = ...) -> None: ...

class OutputLines(_message.Message):
    __slots__ = ("number", "lines", "lines_before")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    LINES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    number: int
    lines: _containers.RepeatedCompositeFieldContainer[OutputLine]
    lines_before: int
    def __init__(self, number: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[OutputLine, _Mapping]]] = ..., lines_before: _Optional[int] = ...) -> None: ...

class ShipRequest(_message.Message):
    __slots__ = ("epoch", "incarnation", "run_id", "output")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: str
    run_id: str
    output: OutputLines
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., run_id: _Optional[str] = ..., output: _Optional[_Union[OutputLines, _Mapping]] = ...) -> None: ...

class ShipReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class OutputRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "after")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    after: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class OutputChunk(_message.Message):
    __slots__ = ("position", "size", "worker", "lines")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    position: int
    size: int
    worker: str
    lines: bytes
    def __init__(self, position: _Optional[int] = ..., size: _Optional[int] = ..., worker: _Optional[str] = ..., lines: _Optional[bytes] = ...) -> None: ...

class OutputReply(_message.Message):
    __slots__ = ("epoch", "chunks", "end", "root_log", "run_ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ROOT_LOG_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    chunks: _containers.RepeatedCompositeFieldContainer[OutputChunk]
    end: bool
    root_log: int
    run_ended: bool
    def __init__(self, epoch: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[OutputChunk, _Mapping]]] = ..., end: bool = ..., root_log: _Optional[int] = ..., run_ended: bool = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("epoch", "run_id", "after", "newest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run_id: str
    after: int
    newest: int
    def __init__(self, epoch: _Optional[int] = ..., run_id: _Optional[str] = ..., after: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class HappenedEvent(_message.Message):
    __slots__ = ("number", "at_ms", "event", "level", "fields")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_ms: int
    event: str
    level: str
    fields: bytes
    def __init__(self, number: _Optional[int] = ..., at_ms: _Optional[int] = ..., event: _Optional[str] = ..., level: _Optional[str] = ..., fields: _Optional[bytes] = ...) -> None: ...

class EventsReply(_message.Message):
    __slots__ = ("epoch", "events", "end", "run_ended")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RUN_ENDED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    events: _containers.RepeatedCompositeFieldContainer[HappenedEvent]
    end: bool
    run_ended: bool
    def __init__(self, epoch: _Optional[int] = ..., events: _Optional[_Iterable[_Union[HappenedEvent, _Mapping]]] = ..., end: bool = ..., run_ended: bool = ...) -> None: ...
