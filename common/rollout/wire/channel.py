"""Channels and servers: one set of limits and keepalive times, so that both ends agree.

A server that is pinged more often than it permits answers GOAWAY `too_many_pings`, which drops every stream of the
connection; the permitted interval is therefore half of what clients use.
"""

from __future__ import annotations

from typing import Protocol

import grpc

from rollout.model.address import Address, parse_address

__all__ = [
    "CLIENT_OPTIONS",
    "COORDINATOR_NAME",
    "MAX_FRAME_BYTES",
    "RECEIVE_MAX_BYTES",
    "SERVER_OPTIONS",
    "Address",
    "open_channel",
    "parse_address",
]

MAX_FRAME_BYTES = 1 << 20
"""Maximum size of a frame for its sender."""

RECEIVE_MAX_BYTES = MAX_FRAME_BYTES + (128 << 10)
"""Maximum size that a server accepts; above it the call ends with RESOURCE_EXHAUSTED, and other calls continue."""

REPLY_MAX_BYTES = 16 << 20
"""Maximum size that a client accepts: unary replies (a list of runs) are not cut into frames."""

KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
PING_TIMEOUT_MS = 10_000
"""Milliseconds from a keepalive ping to the end of a connection without an answer: its peer hangs, or its host is gone.

gRPC by itself waits a minute, whatever the keepalive timeout, and a client would stay with a leader that hangs. The
time is long enough for an overloaded coordinator.
"""

COORDINATOR_NAME = "coordinator.rollout.internal"
"""DNS name in every coordinator's certificate, and in no other.

Clients verify it in place of the address they dialed, so a coordinator may be reached through any address, NAT or
forwarded port, and nobody else can impersonate it.
"""

HANDSHAKE_MS = 10_000
"""Milliseconds from a connection's first packet to the end of its TLS handshake and HTTP/2 settings, before it is
closed.

The time is long enough for a thousand workers that reconnect at the same moment on a busy machine.
"""

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_receive_message_length", RECEIVE_MAX_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_pings_without_data", 0),
    # Without this a second process could listen on the same port and take half of the connections.
    ("grpc.so_reuseport", 0),
]

CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", REPLY_MAX_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A rebuilt channel must not inherit an old one's connection, certificate or backoff.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # also the time that one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.ssl_target_name_override", COORDINATOR_NAME),
]


class HasChannelCredentials(Protocol):
    def channel_credentials(self) -> grpc.ChannelCredentials: ...


def open_channel(address: str, credentials: grpc.ChannelCredentials | HasChannelCredentials) -> grpc.aio.Channel:
    """Return a channel to a coordinator, which connects lazily. Raises ConfigError if `address` is not host:port."""
    target = parse_address(address, "coordinator address", need_port=True)
    if not isinstance(credentials, grpc.ChannelCredentials):
        credentials = credentials.channel_credentials()
    return grpc.aio.secure_channel(str(target), credentials, options=CLIENT_OPTIONS)
