from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class InitRequest(_message.Message):
    __slots__ = ("epoch", "worker", "config")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: str
    config: bytes
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[str] = ..., config: _Optional[bytes] = ...) -> None: ...

class InitResponse(_message.Message):
    __slots__ = ("epoch", "name", "version", "abi")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ABI_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    name: str
    version: str
    abi: int
    def __init__(self, epoch: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., abi: _Optional[int] = ...) -> None: ...

class PreflightRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class PreflightResponse(_message.Message):
    __slots__ = ("epoch", "ok", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ok: bool
    message: str
    def __init__(self, epoch: _Optional[int] = ..., ok: bool = ..., message: _Optional[str] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("epoch", "method", "payload", "timeout_ms", "call_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    method: str
    payload: bytes
    timeout_ms: int
    call_id: int
    def __init__(self, epoch: _Optional[int] = ..., method: _Optional[str] = ..., payload: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., call_id: _Optional[int] = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ("epoch", "payload", "error_code", "error_message", "call_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    payload: bytes
    error_code: str
    error_message: str
    call_id: int
    def __init__(self, epoch: _Optional[int] = ..., payload: _Optional[bytes] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., call_id: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("epoch", "accepted", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    accepted: bool
    message: str
    def __init__(self, epoch: _Optional[int] = ..., accepted: bool = ..., message: _Optional[str] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("epoch", "grace_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    grace_ms: int
    def __init__(self, epoch: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...
