"""Errors of the product as gRPC statuses, and back.

The stable code travels as trailing metadata `rollout-code`; a standby adds `rollout-leader` when it knows the leader.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, NoReturn

import grpc

from rollout.model import errors
from rollout.model.errors import RolloutError
from rollout.wire.epoch import StaleEpochError

CODE_KEY = "rollout-code"
LEADER_KEY = "rollout-leader"
DETAILS_MAX = 1500  # a status travels in headers, which peers cap at 8 KiB; percent-encoding may triple it

_STATUS: tuple[tuple[type[RolloutError], grpc.StatusCode], ...] = (
    (errors.InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.AuthError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.ConflictError, grpc.StatusCode.ALREADY_EXISTS),
    (errors.StateError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.FencedError, grpc.StatusCode.UNAVAILABLE),
    (errors.NotLeaderError, grpc.StatusCode.UNAVAILABLE),
    (errors.UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.StorageUnavailableError, grpc.StatusCode.UNAVAILABLE),
    (errors.StorageFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ObjectCorruptError, grpc.StatusCode.DATA_LOSS),
    (errors.StorageDamagedError, grpc.StatusCode.DATA_LOSS),
)

_KINDS: dict[str, type[RolloutError]] = {
    kind.code: kind
    for kind in (
        *(kind for kind, _ in _STATUS),
        StaleEpochError,
        errors.StorageError,
        errors.StorageFaultError,
        errors.SchemaVersionError,
        errors.StorageDamagedError,
        errors.ObjectCorruptError,
        errors.PluginError,
        errors.AttemptError,
        RolloutError,
    )
}

# Statuses that carry no code of ours: made by gRPC itself, a proxy, or a peer that is no coordinator.
_FOREIGN: dict[grpc.StatusCode, type[RolloutError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.UnavailableError,
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
    grpc.StatusCode.ABORTED: errors.UnavailableError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.ProtocolError,
    grpc.StatusCode.OUT_OF_RANGE: errors.ProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ProtocolError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthError,
    grpc.StatusCode.PERMISSION_DENIED: errors.AuthError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.ConflictError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.StateError,
}


_WRAPPING = re.compile(
    r"failed to connect to all addresses; last error: |\b(UNKNOWN|UNAVAILABLE|INTERNAL): (?=ipv|unix)|\bipv[46]:"
    r"|Failed to connect to remote host: "
)


def status_of(error: RolloutError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return status code, details and trailing metadata."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    # A lone surrogate (a file name, a model's output) cannot be encoded and would lose the whole status.
    details = error.message.encode("utf-8", "replace").decode()
    if len(details) > DETAILS_MAX:
        details = details[:DETAILS_MAX] + " ..."
    metadata = [(CODE_KEY, error.code)]
    leader = str(error.context.get("leader") or "")
    if leader and leader.isascii() and leader.isprintable():
        metadata.append((LEADER_KEY, leader))
    return status, details, tuple(metadata)


def error_of(failed: grpc.aio.AioRpcError) -> RolloutError:
    """Return the error that the other side raised, else the nearest one for a status made by gRPC itself."""
    found: dict[str, str] = {}
    for key, value in failed.trailing_metadata() or ():
        if isinstance(value, str):
            found[str(key)] = value
    status = failed.code()
    details = failed.details() or f"The call ended with {status.name}."
    leader = {"leader": found[LEADER_KEY]} if LEADER_KEY in found else {}
    kind = _KINDS.get(found.get(CODE_KEY, ""))
    if kind is not None:
        return kind(details, **leader)
    return _foreign(status, details)


def _foreign(status: grpc.StatusCode, details: str) -> RolloutError:
    if status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        # The transport's own endings of a stream; the call itself may well succeed on another connection.
        # "Internal error from Core": grpc.aio's word for a write to a stream that the server has just ended.
        endings = ("RST_STREAM", "Stream removed", "GOAWAY", "Internal error from Core")
        if any(ending in details for ending in endings):
            return errors.UnavailableError(details)
        return RolloutError(f"The other side failed: {details}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolError(
            f"The other side does not know this call ({details}); is that the right port, and the same version?"
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return errors.ProtocolError(f"The message is too large for the other side: {details}; send smaller batches")
    details = _plain(details)
    if "CERTIFICATE_VERIFY_FAILED" in details:
        details = f"{details}; the certificate there was not issued by this cluster's CA, or one of them has expired"
    return _FOREIGN.get(status, RolloutError)(details)


def _plain(details: str) -> str:
    """Shorten gRPC's `failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:50051: Failed to connect
    to remote host: Connection refused` to `10.0.0.1:50051: Connection refused`."""
    return _WRAPPING.sub("", details)


async def abort(context: Any, error: RolloutError) -> NoReturn:
    """End a call on the server side with the status of `error`.

    While a write of the same call waits for a peer that does not read, or once that peer has gone, grpc.aio accepts no
    status: the call then ends without one, as if it had been cancelled.
    """
    code, details, metadata = status_of(error)
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("context.abort raises")
