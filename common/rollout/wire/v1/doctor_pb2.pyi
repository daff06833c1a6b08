from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExamineRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ExamineReply(_message.Message):
    __slots__ = ("epoch", "part", "leader", "trouble", "host", "version", "python", "now_ms", "started_ms", "storage", "storage_ms", "join_addr", "objects_addr", "coordinators", "open_files", "open_files_limit", "certificate_ends_ms", "disks", "objects")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_MS_FIELD_NUMBER: _ClassVar[int]
    JOIN_ADDR_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_ADDR_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_MS_FIELD_NUMBER: _ClassVar[int]
    DISKS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    part: str
    leader: str
    trouble: str
    host: str
    version: str
    python: str
    now_ms: int
    started_ms: int
    storage: str
    storage_ms: float
    join_addr: str
    objects_addr: str
    coordinators: _containers.RepeatedScalarFieldContainer[str]
    open_files: int
    open_files_limit: int
    certificate_ends_ms: int
    disks: _containers.RepeatedCompositeFieldContainer[DiskSpace]
    objects: str
    def __init__(self, epoch: _Optional[int] = ..., part: _Optional[str] = ..., leader: _Optional[str] = ..., trouble: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., python: _Optional[str] = ..., now_ms: _Optional[int] = ..., started_ms: _Optional[int] = ..., storage: _Optional[str] = ..., storage_ms: _Optional[float] = ..., join_addr: _Optional[str] = ..., objects_addr: _Optional[str] = ..., coordinators: _Optional[_Iterable[str]] = ..., open_files: _Optional[int] = ..., open_files_limit: _Optional[int] = ..., certificate_ends_ms: _Optional[int] = ..., disks: _Optional[_Iterable[_Union[DiskSpace, _Mapping]]] = ..., objects: _Optional[str] = ...) -> None: ...

class DiskSpace(_message.Message):
    __slots__ = ("what", "path", "free", "total")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    what: str
    path: str
    free: int
    total: int
    def __init__(self, what: _Optional[str] = ..., path: _Optional[str] = ..., free: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...
