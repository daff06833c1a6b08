from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeRequest(_message.Message):
    __slots__ = ("epoch", "incarnation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: str
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ControlCommand(_message.Message):
    __slots__ = ("epoch", "drain", "reload", "log_level", "config")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    drain: Drain
    reload: ReloadPlugins
    log_level: SetLogLevel
    config: UpdateConfig
    def __init__(self, epoch: _Optional[int] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., reload: _Optional[_Union[ReloadPlugins, _Mapping]] = ..., log_level: _Optional[_Union[SetLogLevel, _Mapping]] = ..., config: _Optional[_Union[UpdateConfig, _Mapping]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("budget_ms", "reason")
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    budget_ms: int
    reason: str
    def __init__(self, budget_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReloadPlugins(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class SetLogLevel(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class UpdateConfig(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...
