from rollout.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayUp(_message.Message):
    __slots__ = ("epoch", "open", "data", "then")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    open: OpenGateway
    data: ReplicaData
    then: _containers.RepeatedCompositeFieldContainer[GatewayUp]
    def __init__(self, epoch: _Optional[int] = ..., open: _Optional[_Union[OpenGateway, _Mapping]] = ..., data: _Optional[_Union[ReplicaData, _Mapping]] = ..., then: _Optional[_Iterable[_Union[GatewayUp, _Mapping]]] = ...) -> None: ...

class GatewayDown(_message.Message):
    __slots__ = ("epoch", "opened", "up", "down", "data", "then")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    opened: GatewayOpened
    up: ReplicaUp
    down: ReplicaDown
    data: ReplicaData
    then: _containers.RepeatedCompositeFieldContainer[GatewayDown]
    def __init__(self, epoch: _Optional[int] = ..., opened: _Optional[_Union[GatewayOpened, _Mapping]] = ..., up: _Optional[_Union[ReplicaUp, _Mapping]] = ..., down: _Optional[_Union[ReplicaDown, _Mapping]] = ..., data: _Optional[_Union[ReplicaData, _Mapping]] = ..., then: _Optional[_Iterable[_Union[GatewayDown, _Mapping]]] = ...) -> None: ...

class OpenGateway(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GatewayOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicaUp(_message.Message):
    __slots__ = ("replica", "worker", "engine")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.ReplicaKey
    worker: str
    engine: str
    def __init__(self, replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., worker: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class ReplicaDown(_message.Message):
    __slots__ = ("replica", "draining")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.ReplicaKey
    draining: bool
    def __init__(self, replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., draining: bool = ...) -> None: ...

class ReplicaData(_message.Message):
    __slots__ = ("replica", "data", "more")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.ReplicaKey
    data: bytes
    more: bool
    def __init__(self, replica: _Optional[_Union[_common_pb2.ReplicaKey, _Mapping]] = ..., data: _Optional[bytes] = ..., more: bool = ...) -> None: ...
