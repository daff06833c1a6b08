"""Serves objects over mTLS from a process of its own, so that gigabytes never delay a beat.

The coordinator starts `python -m rollout_coordinator.objects_server` and writes one JSON line to its stdin:
`{"objects": {...}, "storage": {...}, "transport": {...}, "incarnation": ULID, "epoch": N}`. The answer is one line on
stdout, `{"event": "objects_ready", "addr": HOST:PORT}`, and later `{"event": "objects_errors", "count": N}` whenever
the store failed N more calls. Later lines `{"epoch": N}` announce a new epoch. It ends when stdin closes, so it never
outlives its coordinator. Logs go to stderr.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc.aio
import structlog
from rollout.cli.descriptors import open_files_limit, raise_open_files
from rollout.cli.malloc import tune_malloc
from rollout.config.cloud import CloudSection
from rollout.config.settings import ObjectsSection, StorageSection, TransportSection
from rollout.model.errors import ConfigError, RolloutError
from rollout.objects.opening import open_store
from rollout.processes.lifeline import end_with_stdin
from rollout.security.credentials import Credentials
from rollout.security.roles import Role
from rollout.wire import event_loop
from rollout.wire.channel import SERVER_OPTIONS
from rollout.wire.strict import StrictInterceptor
from rollout.wire.v1 import objects_pb2_grpc as rpc

from rollout_coordinator.connections import Door, Doorkeeper, at_most, shares
from rollout_coordinator.objects_service import ObjectsService

log = structlog.get_logger()

END_S = 3.0
"""Time limit for its end once the coordinator is gone; less than it waits when it closes stdin itself."""
_RENEW_CHECK_S = 1.0
_TELL_ERRORS_S = 1.0


def _listen_on(objects: ObjectsSection, transport: TransportSection) -> tuple[str, str]:
    """Return (address to bind, host under which others reach it)."""
    listen = objects.listen_addr or transport.listen_addr.rpartition(":")[0] + ":0"
    host = listen.rpartition(":")[0]
    if transport.advertise_addr and (not objects.listen_addr or host in ("0.0.0.0", "[::]", "")):
        host = transport.advertise_addr.rpartition(":")[0]
    return listen, host


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _keep_renewed(credentials: Credentials) -> None:
    while True:
        await asyncio.sleep(_RENEW_CHECK_S)
        if credentials.renew_due(time.time()):
            try:
                await credentials.renew()
            except RolloutError as e:  # the next second tries again; the old one lives as long again
                log.warning("certificate_not_renewed", reason=str(e))


async def _tell_errors(service: ObjectsService, write: Callable[[str], object]) -> None:
    told = 0
    while True:
        await asyncio.sleep(_TELL_ERRORS_S)
        if service.store_errors > told:
            write(json.dumps({"event": "objects_errors", "count": service.store_errors - told}))
            told = service.store_errors


async def serve(reader: asyncio.StreamReader, write: Callable[[str], object]) -> None:
    """Serve until `reader` ends; `write` gets the ready line, then errors of the store."""
    line = await reader.readline()
    if not line:
        return
    start: dict[str, Any] = json.loads(line)
    objects = ObjectsSection.model_validate(start["objects"])
    storage = StorageSection.model_validate(start["storage"])
    transport = TransportSection.model_validate(start["transport"])
    cloud = CloudSection.model_validate(start["cloud"])
    store = open_store(objects, storage, cloud)
    await store.open()
    service = ObjectsService(store, int(start["epoch"]))
    server: grpc.aio.Server | None = None
    beside: list[asyncio.Task[None]] = []
    try:
        credentials = await Credentials.obtain(
            tls_dir=Path(transport.tls_dir),
            cluster=transport.cluster,
            role=Role.COORDINATOR,
            incarnation=start["incarnation"],
            lifetime_s=transport.certificate_lifetime_s,
            addresses=transport.coordinator_addrs,
        )
        beside.append(asyncio.create_task(_keep_renewed(credentials)))
        connections, _ = shares(open_files_limit(), join=False)
        options = [*SERVER_OPTIONS, *at_most(connections)]
        server = grpc.aio.server(options=options, interceptors=[StrictInterceptor()])
        cast(Any, rpc).add_ObjectsServicer_to_server(service, server)
        listen, host = _listen_on(objects, transport)
        try:
            port = server.add_secure_port(listen, credentials.server_credentials())
        except RuntimeError as error:
            raise ConfigError(
                f"[objects] listen_addr {listen!r} cannot be listened on: is another process there, or is it not an "
                "address of this host? Choose a free host:port, or leave it empty for any free port"
            ) from error
        await server.start()
        doorkeeper = Doorkeeper([Door("objects.listen_addr", port, connections)], time.monotonic)
        beside.append(asyncio.create_task(doorkeeper.run()))
        write(json.dumps({"event": "objects_ready", "addr": f"{host}:{port}"}))
        beside.append(asyncio.create_task(_tell_errors(service, write)))
        while line := await reader.readline():
            service.epoch = max(service.epoch, int(cast("dict[str, Any]", json.loads(line))["epoch"]))
    finally:
        for task in beside:
            task.cancel()
        if server is not None:
            await server.stop(grace=1.0)
        await service.close()
        await store.close()


async def _main() -> None:
    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        await serve(await _stdin(), write)
    except RolloutError as e:
        write(json.dumps({"event": "objects_failed", "code": e.code, "message": e.message}))
        raise SystemExit(2 if e.code == "config_invalid" else 1) from None


def main() -> None:
    # A terminal's Ctrl-C and systemd's SIGTERM reach the whole group; uploads of a drain still need this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()  # what was imported stays
    tune_malloc()
    raise_open_files()
    # Nothing is lost by not waiting longer, for a database or a file system that does not answer: an object is there
    # once it is renamed into place, a pin or a row once its transaction is committed.
    end_with_stdin(END_S)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    event_loop.run(_main())
    gc.freeze()  # else all of it is collected at the exit, for which others wait


if __name__ == "__main__":
    main()
