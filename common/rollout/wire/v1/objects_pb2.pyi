from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PutUp(_message.Message):
    __slots__ = ("epoch", "object_id", "size", "chunk", "pin")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    object_id: bytes
    size: int
    chunk: bytes
    pin: str
    def __init__(self, epoch: _Optional[int] = ..., object_id: _Optional[bytes] = ..., size: _Optional[int] = ..., chunk: _Optional[bytes] = ..., pin: _Optional[str] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("epoch", "existed", "size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    existed: bool
    size: int
    def __init__(self, epoch: _Optional[int] = ..., existed: bool = ..., size: _Optional[int] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("epoch", "data", "digest")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    data: bytes
    digest: bytes
    def __init__(self, epoch: _Optional[int] = ..., data: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...

class AddReply(_message.Message):
    __slots__ = ("epoch", "object_id", "offset")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    object_id: bytes
    offset: int
    def __init__(self, epoch: _Optional[int] = ..., object_id: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("epoch", "object_id", "offset", "length")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    object_id: bytes
    offset: int
    length: int
    def __init__(self, epoch: _Optional[int] = ..., object_id: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class GetDown(_message.Message):
    __slots__ = ("epoch", "chunk", "size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    chunk: bytes
    size: int
    def __init__(self, epoch: _Optional[int] = ..., chunk: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("epoch", "object_id", "offset", "length")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBJECT_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    object_id: bytes
    offset: _containers.RepeatedScalarFieldContainer[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., object_id: _Optional[bytes] = ..., offset: _Optional[_Iterable[int]] = ..., length: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("epoch", "part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    part: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., part: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HasRequest(_message.Message):
    __slots__ = ("epoch", "object_ids", "pin")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBJECT_IDS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    object_ids: _containers.RepeatedScalarFieldContainer[bytes]
    pin: str
    def __init__(self, epoch: _Optional[int] = ..., object_ids: _Optional[_Iterable[bytes]] = ..., pin: _Optional[str] = ...) -> None: ...

class HasReply(_message.Message):
    __slots__ = ("epoch", "has")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    has: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, epoch: _Optional[int] = ..., has: _Optional[_Iterable[bool]] = ...) -> None: ...
