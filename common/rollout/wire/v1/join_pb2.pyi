from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AuthorityRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class AuthorityReply(_message.Message):
    __slots__ = ("epoch", "ca_pem")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ca_pem: bytes
    def __init__(self, epoch: _Optional[int] = ..., ca_pem: _Optional[bytes] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("epoch", "token", "csr_pem", "host_name")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    token: str
    csr_pem: bytes
    host_name: str
    def __init__(self, epoch: _Optional[int] = ..., token: _Optional[str] = ..., csr_pem: _Optional[bytes] = ..., host_name: _Optional[str] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("epoch", "host_id", "role", "certificate_pem", "ca_pem", "issuer_key_pem", "issuer_pem", "coordinator_addrs", "cluster")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    ISSUER_KEY_PEM_FIELD_NUMBER: _ClassVar[int]
    ISSUER_PEM_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ADDRS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    host_id: str
    role: str
    certificate_pem: bytes
    ca_pem: bytes
    issuer_key_pem: bytes
    issuer_pem: bytes
    coordinator_addrs: _containers.RepeatedScalarFieldContainer[str]
    cluster: str
    def __init__(self, epoch: _Optional[int] = ..., host_id: _Optional[str] = ..., role: _Optional[str] = ..., certificate_pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ..., issuer_key_pem: _Optional[bytes] = ..., issuer_pem: _Optional[bytes] = ..., coordinator_addrs: _Optional[_Iterable[str]] = ..., cluster: _Optional[str] = ...) -> None: ...

class IssueRequest(_message.Message):
    __slots__ = ("epoch", "incarnation", "csr_pem")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    incarnation: str
    csr_pem: bytes
    def __init__(self, epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., csr_pem: _Optional[bytes] = ...) -> None: ...

class IssueReply(_message.Message):
    __slots__ = ("epoch", "certificate_pem", "not_after_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    certificate_pem: bytes
    not_after_ms: int
    def __init__(self, epoch: _Optional[int] = ..., certificate_pem: _Optional[bytes] = ..., not_after_ms: _Optional[int] = ...) -> None: ...
