"""Each check of identities, certificates and ports by itself."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from rollout.config.settings import TransportSection
from rollout.model.errors import AuthError, ConfigError, NotLeaderError, StateError, UnavailableError
from rollout.security import files, keys
from rollout.security.hosts import revoke_host
from rollout.security.join_client import join
from rollout.security.roles import Peer, Role, caller, identity_of
from rollout.security.tokens import consume_token, parse_token
from rollout.wire.channel import SERVER_OPTIONS
from rollout.wire.v1 import join_pb2
from rollout_coordinator.core.events import Now
from rollout_coordinator.http.metrics import Metrics
from rollout_coordinator.join import CertificatesService, JoinService
from rollout_coordinator.leadership import Gate, Leadership, Part
from test_security_join import A, B, C, Cluster, cluster

__all__ = ["cluster"]


def presenting(pem: bytes) -> Any:
    """A call's context, whose peer has shown this chain."""
    return SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [pem]})


def worker_pem(cluster: Cluster, incarnation: str, host_id: str = "", lifetime_s: float = 60) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    issued = cluster.authority.issue_process(
        key, role=Role.WORKER, incarnation=incarnation, lifetime_s=lifetime_s, host_id=host_id
    )
    return issued.pem


async def test_a_certificate_that_expired_on_an_open_connection(cluster: Cluster) -> None:
    assert caller(presenting(worker_pem(cluster, A))).role is Role.WORKER
    with pytest.raises(AuthError, match="expired"):
        caller(presenting(worker_pem(cluster, B, lifetime_s=-1)))


def test_a_certificate_with_two_identities_has_none() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    uris = [x509.UniformResourceIdentifier(f"spiffe://c/worker/{one}") for one in (A, B)]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(minutes=1))
        .add_extension(x509.SubjectAlternativeName(uris), critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    assert certificate.public_bytes(serialization.Encoding.PEM)
    with pytest.raises(AuthError, match="not an identity"):
        identity_of(certificate)


def test_a_revoked_or_expired_host_is_refused_in_the_middle() -> None:
    revoked: set[str] = set()
    clock: Any = SimpleNamespace(now=lambda: Now(time.monotonic(), time.time_ns() // 1_000_000))
    gate = Gate(Leadership(), Metrics(), clock, revoked.__contains__)
    peer = Peer(Role.WORKER, A, "H", "c", time.time() + 60)
    gate.check_host(peer)
    with pytest.raises(AuthError, match="expired"):
        gate.check_host(Peer(Role.WORKER, A, "H", "c", time.time() - 1))
    revoked.add("H")
    with pytest.raises(AuthError, match="revoked"):
        gate.check_host(peer)


async def test_a_revoked_key_does_not_join_again(cluster: Cluster) -> None:
    service = JoinService(cluster.storage, cluster.authority, TransportSection(cluster="test"), lambda: 1)
    csr = keys.signing_request(keys.new_key())

    async def enrol(secret: str) -> join_pb2.EnrolReply:
        return await service._enrol(join_pb2.EnrolRequest(epoch=0, token=secret, csr_pem=csr, host_name="h"), "me")

    host = await enrol(parse_token(await cluster.token()).secret)
    await revoke_host(cluster.storage, host.host_id)
    again = parse_token(await cluster.token()).secret
    with pytest.raises(StateError, match="revoked"):
        await enrol(again)
    assert await consume_token(cluster.storage, again, "another") is Role.WORKER, "the token was not used up"


async def test_a_process_buys_no_other_identity(cluster: Cluster, tmp_path: Path) -> None:
    host = await join(cluster.join_address, await cluster.token(), tmp_path / "h")
    service = CertificatesService(cluster.storage, cluster.authority, TransportSection(cluster="test"), lambda: 1)
    csr = keys.signing_request(keys.new_key())
    context = presenting(worker_pem(cluster, A, host.host_id))
    assert (await service._issue(join_pb2.IssueRequest(epoch=0, incarnation=A, csr_pem=csr), context)).certificate_pem
    with pytest.raises(AuthError, match="its own certificate"):
        await service._issue(join_pb2.IssueRequest(epoch=0, incarnation=C, csr_pem=csr), context)


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / files.HOST_KEY
    files.write_atomic(path, b"key", 0o600)
    assert files.read(path) == b"key"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="every user"):
        files.read(path)


async def test_a_port_is_not_shared() -> None:
    first, second = grpc.aio.server(options=SERVER_OPTIONS), grpc.aio.server(options=SERVER_OPTIONS)
    port = first.add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")
    await first.stop(None)
    await second.stop(None)


def test_who_does_not_lead_serves_nobody() -> None:
    leadership = Leadership()
    clock: Any = SimpleNamespace(now=lambda: Now(0.0, 0))
    gate = Gate(leadership, Metrics(), clock, lambda host: False)
    leadership.leader_address = "other:1"
    with pytest.raises(NotLeaderError) as refused:
        gate.check(join_pb2.IssueRequest(epoch=0))
    assert refused.value.context["leader"] == "other:1"
    leadership.part = Part.REPLAYING
    with pytest.raises(UnavailableError):
        gate.check(join_pb2.IssueRequest(epoch=0))
    leadership.part = Part.LEADER
    gate.check(join_pb2.IssueRequest(epoch=0))
