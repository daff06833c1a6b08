"""The gRPC servers of a coordinator: the mutual TLS port, and the port where hosts join."""

from __future__ import annotations

from typing import Any, cast

import grpc
from rollout.model.errors import ConfigError
from rollout.security.authority import Authority
from rollout.security.credentials import Credentials
from rollout.wire.channel import SERVER_OPTIONS
from rollout.wire.strict import StrictInterceptor
from rollout.wire.v1 import (
    control_pb2_grpc,
    doctor_pb2_grpc,
    heartbeat_pb2_grpc,
    history_pb2_grpc,
    join_pb2_grpc,
    runs_pb2_grpc,
    serve_pb2_grpc,
    work_pb2_grpc,
)

from rollout_coordinator.connections import JOIN_OPTIONS, at_most
from rollout_coordinator.health import health_handler
from rollout_coordinator.join import CertificatesService, JoinService
from rollout_coordinator.leadership import StandbyInterceptor
from rollout_coordinator.wiring import Parts


def _listen(server: grpc.aio.Server, key: str, addr: str, credentials: grpc.ServerCredentials) -> str:
    host = addr.rpartition(":")[0]
    try:
        port = server.add_secure_port(addr, credentials)
    except RuntimeError as error:
        raise ConfigError(
            f"[transport] {key} {addr!r} cannot be listened on: is another process there, or is it not an address of "
            "this host? Choose a free host:port."
        ) from error
    return f"{host}:{port}"


def bind_server(
    parts: Parts, credentials: Credentials, authority: Authority, connections: int
) -> tuple[grpc.aio.Server, str]:
    """Return the mTLS server, bound but not started, and its address. Raises ConfigError if the port is taken."""
    server = grpc.aio.server(
        options=[*SERVER_OPTIONS, *at_most(connections)],
        interceptors=[StandbyInterceptor(parts.leadership), StrictInterceptor()],
    )
    cast(Any, heartbeat_pb2_grpc).add_HeartbeatServicer_to_server(parts.heartbeat, server)
    cast(Any, control_pb2_grpc).add_ControlServicer_to_server(parts.control, server)
    cast(Any, work_pb2_grpc).add_WorkServicer_to_server(parts.work, server)
    cast(Any, runs_pb2_grpc).add_RunsServicer_to_server(parts.runs, server)
    cast(Any, serve_pb2_grpc).add_ServeServicer_to_server(parts.serve, server)
    cast(Any, history_pb2_grpc).add_HistoryServicer_to_server(parts.history_service, server)
    cast(Any, doctor_pb2_grpc).add_DoctorServicer_to_server(parts.doctor, server)
    certificates = CertificatesService(
        parts.storage, authority, parts.settings.transport, lambda: parts.leadership.epoch
    )
    cast(Any, join_pb2_grpc).add_CertificatesServicer_to_server(certificates, server)
    server.add_generic_rpc_handlers((health_handler(),))
    addr = _listen(server, "listen_addr", parts.settings.transport.listen_addr, credentials.server_credentials())
    return server, addr


def bind_join_server(
    parts: Parts, credentials: Credentials, authority: Authority, connections: int
) -> tuple[grpc.aio.Server, str]:
    """Return the server of `join_addr`, where callers have no certificate yet, like `bind_server`."""
    transport = parts.settings.transport
    server = grpc.aio.server(
        options=[*SERVER_OPTIONS, *JOIN_OPTIONS, *at_most(connections)],
        interceptors=[StrictInterceptor()],
        maximum_concurrent_rpcs=64,
    )
    join = JoinService(
        parts.storage,
        authority,
        transport,
        lambda: parts.leadership.epoch,
        addresses=lambda: parts.members.told,
    )
    cast(Any, join_pb2_grpc).add_JoinServicer_to_server(join, server)
    addr = _listen(server, "join_addr", transport.join_addr, credentials.join_server_credentials())
    return server, addr
