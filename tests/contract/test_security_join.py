"""Tokens, joining, buying certificates, revocation and renewal, against real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from rollout.config.settings import EmbeddedStorage, StorageSection, TransportSection
from rollout.model.address import Address
from rollout.model.errors import (
    AuthError,
    ConfigError,
    FencedError,
    NotLeaderError,
    ProtocolError,
    RolloutError,
    StorageUnavailableError,
    UnavailableError,
)
from rollout.security import files, join_client, keys
from rollout.security.authority import Authority
from rollout.security.credentials import Credentials
from rollout.security.hosts import Revocations, find_host, list_hosts, revoke_host
from rollout.security.join_client import join
from rollout.security.roles import Role, require
from rollout.security.tokens import consume_token, create_token, parse_token
from rollout.storage import open_storage
from rollout.storage.port import Storage
from rollout.wire import silence
from rollout.wire.channel import SERVER_OPTIONS, open_channel
from rollout.wire.errors import abort, error_of
from rollout.wire.v1 import heartbeat_pb2, heartbeat_pb2_grpc, join_pb2, join_pb2_grpc
from rollout_coordinator.join import Brake, CertificatesService, JoinService

A, B, C = (f"01ARZ3NDEKTSV4RRFFQ69G5FA{x}" for x in "ABC")


class Beats(heartbeat_pb2_grpc.HeartbeatServicer):
    async def Beat(self, request: heartbeat_pb2.BeatUp, context: Any) -> heartbeat_pb2.BeatAck:
        try:
            require(context, Role.WORKER, id=request.incarnation, cluster="test")
        except RolloutError as error:
            await abort(context, error)
        return heartbeat_pb2.BeatAck(epoch=1, number=request.number, known=True)

    async def Beats(self, request_iterator: Any, context: Any) -> AsyncIterator[heartbeat_pb2.BeatAck]:
        async for request in request_iterator:
            yield heartbeat_pb2.BeatAck(epoch=1, number=request.number, known=True)


@dataclass
class Cluster:
    storage: Storage
    authority: Authority
    tls_dir: Path
    credentials: Credentials
    address: str
    join_address: str

    async def token(self, role: Role = Role.WORKER, **options: Any) -> str:
        return await create_token(self.storage, role, ca_hash=self.authority.ca_hash, **options)

    async def obtain(self, tls_dir: Path, role: Role = Role.WORKER, incarnation: str = B, **more: Any) -> Credentials:
        return await Credentials.obtain(
            tls_dir=tls_dir, cluster="test", role=role, incarnation=incarnation,
            lifetime_s=more.pop("lifetime_s", 60), addresses=[self.address],
            patience_s=more.pop("patience_s", 0), **more,
        )  # fmt: skip

    async def beat(self, credentials: Any, incarnation: str = B) -> int:
        async with open_channel(self.address, credentials) as channel:
            stub: Any = heartbeat_pb2_grpc.HeartbeatStub(channel)
            try:
                return (await stub.Beat(heartbeat_pb2.BeatUp(epoch=1, incarnation=incarnation, number=7))).number
            except grpc.aio.AioRpcError as failed:
                raise error_of(failed) from failed


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    storage = open_storage(StorageSection(embedded=EmbeddedStorage(path=str(tmp_path / "r.db"))))
    await storage.open()
    tls_dir = tmp_path / "coordinator"
    authority = Authority.load_or_create(tls_dir, "test")
    credentials = await Credentials.obtain(
        tls_dir=tls_dir, cluster="test", role=Role.COORDINATOR, incarnation=A, lifetime_s=60
    )
    main, joining = grpc.aio.server(options=SERVER_OPTIONS), grpc.aio.server(options=SERVER_OPTIONS)
    address = f"127.0.0.1:{main.add_secure_port('127.0.0.1:0', credentials.server_credentials())}"
    join_address = f"127.0.0.1:{joining.add_secure_port('127.0.0.1:0', credentials.join_server_credentials())}"
    transport = TransportSection(listen_addr=address, cluster="test", certificate_lifetime_s=8)
    join_pb2_grpc.add_CertificatesServicer_to_server(
        CertificatesService(storage, authority, transport, lambda: 1), main
    )
    heartbeat_pb2_grpc.add_HeartbeatServicer_to_server(Beats(), main)
    join_pb2_grpc.add_JoinServicer_to_server(
        JoinService(storage, authority, transport, lambda: 1, brake=Brake(limit=3)), joining
    )
    await main.start()
    await joining.start()
    yield Cluster(storage, authority, tls_dir, credentials, address, join_address)
    await main.stop(None)
    await joining.stop(None)
    await storage.close()


async def test_a_host_joins_and_its_process_is_known(cluster: Cluster, tmp_path: Path) -> None:
    host = tmp_path / "host"
    joined = await join(cluster.join_address, await cluster.token(), host, "gpu-7")
    assert (joined.role, joined.cluster, joined.coordinator_addrs) == (Role.WORKER, "test", (cluster.address,))
    assert (host / files.HOST_KEY).stat().st_mode & 0o777 == 0o600
    assert {p.name for p in host.iterdir()} == {files.CA, files.HOST, files.HOST_KEY, files.JOINED}
    credentials = await cluster.obtain(host)
    assert credentials.host_id == joined.host_id
    assert await cluster.beat(credentials) == 7
    assert [(h.id, h.name) for h in await list_hosts(cluster.storage)] == [(joined.host_id, "gpu-7")]


async def test_joining_again_is_the_same_host_and_no_second_use(cluster: Cluster, tmp_path: Path) -> None:
    token = await cluster.token()
    first = await join(cluster.join_address, token, tmp_path / "h")
    assert (await join(cluster.join_address, token, tmp_path / "h")).host_id == first.host_id
    with pytest.raises(AuthError, match="used up"):
        await join(cluster.join_address, token, tmp_path / "other")
    assert (await join(cluster.join_address, await cluster.token(), tmp_path / "h")).host_id == first.host_id


async def test_a_token_with_two_uses_lets_two_of_many_in(cluster: Cluster) -> None:
    secret = parse_token(await cluster.token(uses=2)).secret
    tries = [consume_token(cluster.storage, secret, f"key{i}") for i in range(8)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["AuthError"] * 6 + ["Role"] * 2


async def test_each_bad_token_says_what_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    token = await cluster.token()
    wrong = token[:12] + ("a" if token[12] != "a" else "b") + token[13:]
    for text, message in (
        ("hello", "not a join token"),
        (wrong, "mistyped"),
        (token[:-9], "is cut off: it has 4 parts"),
        (token[:-3], "mistyped or cut off"),
    ):
        with pytest.raises(ConfigError, match=message):
            await join(cluster.join_address, text, tmp_path / "h")
    late = parse_token(await cluster.token(ttl_s=10)).secret
    with pytest.raises(AuthError, match="expired"):
        await consume_token(cluster.storage, late, "k", clock=lambda: 4e9)
    stored = await cluster.storage.scan("security", "token/")
    assert all(late not in key and late.encode() not in value for key, value in stored)
    with pytest.raises(ConfigError):
        await cluster.token(uses=0)


async def test_guessing_is_braked(cluster: Cluster, tmp_path: Path) -> None:
    other = Authority.load_or_create(tmp_path / "x", "test")
    unknown = parse_token(await create_token(cluster.storage, Role.WORKER, ca_hash=other.ca_hash)).secret + "x"
    stub_request = join_pb2.EnrolRequest(epoch=0, token=unknown, csr_pem=keys.signing_request(keys.new_key()))
    seen: list[type[RolloutError]] = []
    async with open_channel(cluster.join_address, grpc.ssl_channel_credentials(cluster.authority.ca_pem)) as channel:
        stub: Any = join_pb2_grpc.JoinStub(channel)
        for _ in range(4):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await stub.Enrol(stub_request)
            seen.append(type(error_of(failed.value)))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Authority(join_pb2.AuthorityRequest())
        assert isinstance(error_of(failed.value), ProtocolError)
    assert seen == [AuthError] * 3 + [UnavailableError]


async def test_another_ca_gets_no_token_and_leaves_no_file(cluster: Cluster, tmp_path: Path) -> None:
    other = Authority.load_or_create(tmp_path / "x", "test")
    token = await create_token(cluster.storage, Role.WORKER, ca_hash=other.ca_hash)
    with pytest.raises(AuthError, match="another CA"):
        await join(cluster.join_address, token, tmp_path / "h")
    assert not (tmp_path / "h").exists()
    assert (await consume_token(cluster.storage, parse_token(token).secret, "k")) is Role.WORKER
    with pytest.raises(ConfigError, match="CA key"):
        await join(cluster.join_address, await cluster.token(), cluster.tls_dir)


async def test_the_wrong_port_is_explained(cluster: Cluster, tmp_path: Path) -> None:
    for address in (cluster.address, "127.0.0.1:1"):
        with pytest.raises(UnavailableError, match="join_addr"):
            await join(address, await cluster.token(), tmp_path / "h")


async def test_a_standby_issues_what_everybody_trusts(cluster: Cluster, tmp_path: Path) -> None:
    await join(cluster.join_address, await cluster.token(Role.COORDINATOR), tmp_path / "standby")
    standby = Authority.load_or_create(tmp_path / "standby", "test")
    assert standby.ca_pem == cluster.authority.ca_pem
    assert (tmp_path / "standby" / files.ISSUER_KEY).stat().st_mode & 0o777 == 0o600
    # A worker with a certificate of the standby is taken by the first coordinator, and the other way round.
    assert await cluster.beat(await cluster.obtain(tmp_path / "standby")) == 7
    serving = await cluster.obtain(tmp_path / "standby", Role.COORDINATOR, C)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    heartbeat_pb2_grpc.add_HeartbeatServicer_to_server(Beats(), server)
    cluster.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', serving.server_credentials())}"
    await server.start()
    assert await cluster.beat(await cluster.obtain(cluster.tls_dir)) == 7
    # Hosts join at the standby too, by tokens with the hash of the one CA.
    joining = grpc.aio.server(options=SERVER_OPTIONS)
    transport = TransportSection(listen_addr=cluster.address, cluster="test")
    join_pb2_grpc.add_JoinServicer_to_server(JoinService(cluster.storage, standby, transport, lambda: 1), joining)
    at = f"127.0.0.1:{joining.add_secure_port('127.0.0.1:0', serving.join_server_credentials())}"
    await joining.start()
    assert (await join(at, await cluster.token(), tmp_path / "late")).role is Role.WORKER
    await join(at, await cluster.token(Role.COORDINATOR), tmp_path / "third")
    assert await cluster.beat(await cluster.obtain(tmp_path / "third")) == 7
    await joining.stop(None)
    await server.stop(None)


async def test_identities_are_checked(cluster: Cluster, tmp_path: Path) -> None:
    own = cluster.tls_dir
    with pytest.raises(AuthError, match="claims"):
        await cluster.beat(await cluster.obtain(own, incarnation=C), incarnation=B)
    with pytest.raises(AuthError, match="operator"):
        await cluster.beat(await cluster.obtain(own, Role.OPERATOR))
    Authority.load_or_create(tmp_path / "foreign", "test")
    with pytest.raises(UnavailableError):
        await cluster.beat(await cluster.obtain(tmp_path / "foreign"))
    ca = cluster.authority.ca_pem
    with pytest.raises(UnavailableError):
        await cluster.beat(grpc.ssl_channel_credentials(ca))
    with pytest.raises(UnavailableError):
        await cluster.beat(await cluster.obtain(own, lifetime_s=-5))
    await join(cluster.join_address, await cluster.token(), tmp_path / "h")
    host = grpc.ssl_channel_credentials(
        ca, (tmp_path / "h/host.key.pem").read_bytes(), (tmp_path / "h/host.pem").read_bytes()
    )
    with pytest.raises(AuthError, match="host certificate"):
        await cluster.beat(host)


async def test_a_worker_cannot_pose_as_a_coordinator(cluster: Cluster) -> None:
    worker = await cluster.obtain(cluster.tls_dir)
    with pytest.raises(ConfigError):
        worker.server_credentials()
    server = grpc.aio.server()
    forged = grpc.ssl_server_credentials([(worker._key_pem, worker._chain_pem)])
    cluster.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', forged)}"
    await server.start()
    with pytest.raises(UnavailableError):
        await cluster.beat(worker)
    await server.stop(None)


async def test_a_joined_host_is_held_to_its_role(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rollout-worker join"):
        await cluster.obtain(tmp_path / "nothing")
    await join(cluster.join_address, await cluster.token(Role.OPERATOR), tmp_path / "h")
    with pytest.raises(ConfigError, match="joined as operator"):
        await cluster.obtain(tmp_path / "h")
    with pytest.raises(ConfigError, match="joined as a worker or operator"):
        Authority.load_or_create(tmp_path / "h", "test")
    with pytest.raises(ConfigError, match="belongs to cluster"):
        Authority.load(cluster.tls_dir, "other")


async def test_a_revoked_host_buys_nothing_and_may_come_back_as_another(cluster: Cluster, tmp_path: Path) -> None:
    joined = await join(cluster.join_address, await cluster.token(), tmp_path / "h")
    credentials = await cluster.obtain(tmp_path / "h")
    revocations = Revocations(cluster.storage)
    await revocations.refresh()
    assert not revocations.is_revoked(joined.host_id)
    await revoke_host(cluster.storage, joined.host_id)
    await revocations.refresh()
    assert revocations.is_revoked(joined.host_id)
    with pytest.raises(AuthError, match="revoked"):
        await credentials.renew()
    again = await join(cluster.join_address, await cluster.token(), tmp_path / "h")
    assert again.host_id != joined.host_id
    with pytest.raises(AuthError, match="belongs to host"):
        await cluster.obtain(tmp_path / "h")
    assert await cluster.beat(await cluster.obtain(tmp_path / "h", incarnation=C), C) == 7


@pytest.mark.parametrize("error", [StorageUnavailableError, FencedError, NotLeaderError])
async def test_a_coordinator_that_cannot_answer_at_present_is_asked_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RolloutError]
) -> None:
    """Its database is away, or another one leads: a batch that starts meanwhile must not end with that."""
    host = tmp_path / "host"
    await join(cluster.join_address, await cluster.token(), host)
    left = 3

    async def find_host_later(*arguments: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise error
        return await find_host(*arguments)

    monkeypatch.setattr("rollout_coordinator.join.find_host", find_host_later)
    assert await cluster.beat(await cluster.obtain(host, patience_s=60)) == 7
    assert left == 0
    left = 10**9
    said = "nobody leads at present" if error is NotLeaderError else re.escape(str(error()).rstrip("."))
    with pytest.raises(UnavailableError, match=said):
        await cluster.obtain(host)


async def test_one_that_takes_connections_and_says_nothing_is_told_of(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its handshake has failed."""
    host = tmp_path / "host"
    await join(cluster.join_address, await cluster.token(), host)
    monkeypatch.setattr(silence, "SILENCE_S", 0.01)
    said: asyncio.Queue[RolloutError | None] = asyncio.Queue()
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        cluster.address = f"127.0.0.1:{hanging.getsockname()[1]}"
        buying = asyncio.create_task(cluster.obtain(host, on_trouble=lambda error, _: said.put_nowait(error)))
        assert str(await said.get()) == f"{cluster.address} has not answered yet"
        buying.cancel()
        await asyncio.gather(buying, return_exceptions=True)


async def test_both_ends_renew_under_a_standing_stream(cluster: Cluster, tmp_path: Path) -> None:
    await join(cluster.join_address, await cluster.token(), tmp_path / "h")
    worker = await cluster.obtain(tmp_path / "h")
    async with open_channel(cluster.address, worker) as channel:
        stub: Any = heartbeat_pb2_grpc.HeartbeatStub(channel)
        stream = stub.Beats()
        for number in range(1, 4):
            await cluster.credentials.renew()
            await worker.renew()
            await stream.write(heartbeat_pb2.BeatUp(epoch=1, number=number))
            assert (await stream.read()).number == number
            assert await cluster.beat(worker) == 7  # a new connection, newest certificates on both ends
        await stream.done_writing()
    assert (worker.generation, cluster.credentials.generation) == (4, 4)
    assert worker.renew_due(worker.not_after - 3)
    assert not worker.renew_due(worker.not_after - 7)


async def test_renewal_goes_on_by_itself(cluster: Cluster) -> None:
    worker = await cluster.obtain(cluster.tls_dir, lifetime_s=0.5)
    renewed = asyncio.Event()
    task = asyncio.create_task(worker.keep_renewed(renewed.set))
    await asyncio.wait_for(renewed.wait(), 60)
    task.cancel()
    assert worker.generation > 1


async def test_a_host_certificate_is_renewed_at_half_life(cluster: Cluster, tmp_path: Path) -> None:
    await join(cluster.join_address, await cluster.token(), tmp_path / "h")
    key = keys.load_key((tmp_path / "h/host.key.pem").read_bytes(), "")
    host_id = json.loads((tmp_path / "h/join.json").read_bytes())["host_id"]
    short = cluster.authority.issue_host(key.public_key(), role=Role.WORKER, host_id=host_id, lifetime_s=2)
    (tmp_path / "h/host.pem").write_bytes(short.pem)
    credentials = await cluster.obtain(tmp_path / "h")
    while (tmp_path / "h/host.pem").read_bytes() == short.pem:
        await credentials.renew()
        await asyncio.sleep(0.05)
    assert await cluster.beat(credentials) == 7


def test_one_of_many_processes_makes_the_ca(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Authority.load_or_create(tmp_path, "test").ca_hash, range(8)))
    assert len(set(found)) == 1
    assert (tmp_path / files.CA_KEY).stat().st_mode & 0o777 == 0o600
    (tmp_path / files.CA).unlink()  # as a crash between the two files leaves it
    assert Authority.load_or_create(tmp_path, "test").ca_pem


async def test_revoking_nobody_is_said(cluster: Cluster) -> None:
    with pytest.raises(RolloutError, match="has joined"):
        await revoke_host(cluster.storage, C)


async def test_a_connection_that_is_closed_before_anything_was_said_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a port does that is held by hundreds of connections that say nothing."""
    tries = 0

    async def refuse_twice(*_: object, **__: object) -> tuple[None, str]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ConnectionResetError
        return None, "writer"

    async def no_pause(seconds: float) -> None: ...

    monkeypatch.setattr(asyncio, "open_connection", refuse_twice)
    monkeypatch.setattr(asyncio, "sleep", no_pause)
    opened = await join_client._opened(Address("a", 1), ssl.create_default_context())  # pyright: ignore[reportPrivateUsage]
    assert (opened, tries) == ("writer", 3)
    tries = -9
    with pytest.raises(ConnectionResetError):
        await join_client._opened(Address("a", 1), ssl.create_default_context())  # pyright: ignore[reportPrivateUsage]
    assert tries == -5
