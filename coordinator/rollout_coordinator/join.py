"""Enrols hosts (Join, on join_addr), and issues certificates to their processes (Certificates, over mTLS)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import structlog
from rollout.config.settings import TransportSection
from rollout.model.errors import AuthError, ProtocolError, RolloutError, StateError, UnavailableError
from rollout.model.ids import check_ulid
from rollout.security import keys
from rollout.security.authority import Authority
from rollout.security.claims import claim_incarnation
from rollout.security.hosts import Host, find_host, remember_host
from rollout.security.roles import Enrolment, Role, caller
from rollout.security.tokens import consume_token
from rollout.storage.port import Storage
from rollout.wire.errors import abort
from rollout.wire.v1 import join_pb2, join_pb2_grpc

from rollout_coordinator.leadership import address_of

log = structlog.get_logger()

BAD_TOKENS_A_MINUTE = 20
CALLERS_MAX = 10_000

T = TypeVar("T")


class Brake:
    """Counts wrong tokens of the last minute, by caller and in all; above the limits, further ones are refused
    unread."""

    def __init__(self, limit: int = BAD_TOKENS_A_MINUTE, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._bad: dict[str, deque[float]] = {}

    def check(self, who: str) -> None:
        bad = self._bad.get(who)
        while bad and bad[0] < self._clock() - 60:
            bad.popleft()
        if bad and len(bad) >= self._limit:
            raise UnavailableError(f"Too many wrong join tokens from {who}; wait a minute.")

    def note(self, who: str) -> None:
        if len(self._bad) >= CALLERS_MAX:
            self._bad.clear()  # bounded memory matters more than the count of one caller
        self._bad.setdefault(who, deque(maxlen=self._limit)).append(self._clock())


async def _answer(context: Any, request: Any, work: Callable[[], Awaitable[T]]) -> T:
    try:
        if not request.HasField("epoch"):
            raise ProtocolError(f"{type(request).__name__} carries no epoch.")
        return await work()
    except RolloutError as error:
        await abort(context, error)


class JoinService(join_pb2_grpc.JoinServicer):
    """`addresses` are those of the coordinators as hosts reach them."""

    def __init__(
        self,
        storage: Storage,
        authority: Authority,
        transport: TransportSection,
        epoch: Callable[[], int],
        addresses: Callable[[], Sequence[str]] | None = None,
        brake: Brake | None = None,
    ) -> None:
        self._storage = storage
        self._authority = authority
        self._transport = transport
        self._epoch = epoch
        self._addresses = addresses or self._configured
        self._brake = brake or Brake()

    def _configured(self) -> Sequence[str]:
        section = self._transport
        return section.coordinator_addrs or [section.advertise_addr or section.listen_addr]

    async def Authority(self, request: join_pb2.AuthorityRequest, context: Any) -> join_pb2.AuthorityReply:
        async def work() -> join_pb2.AuthorityReply:
            return join_pb2.AuthorityReply(epoch=self._epoch(), ca_pem=self._authority.ca_pem)

        return await _answer(context, request, work)

    async def Enrol(self, request: join_pb2.EnrolRequest, context: Any) -> join_pb2.EnrolReply:
        return await _answer(context, request, lambda: self._enrol(request, address_of(context.peer())))

    async def _enrol(self, request: join_pb2.EnrolRequest, who: str) -> join_pb2.EnrolReply:
        self._brake.check(who)
        public_key = keys.requested_key(request.csr_pem)
        fingerprint = keys.fingerprint(public_key)
        # A revoked key must not use the token up, so all roles it may have had are looked at first.
        for role in Role:
            host = await find_host(self._storage, keys.host_id_of(self._authority.cluster, role, fingerprint))
            if host is not None and host.revoked:
                raise StateError(f"Host {host.id} was revoked; remove its host.key.pem and join as a new host.")
        try:
            role = await consume_token(self._storage, request.token, fingerprint)
        except AuthError:
            self._brake.note(who)
            log.warning("join_refused", peer=who, host_name=request.host_name[:255])
            raise
        host_id = keys.host_id_of(self._authority.cluster, role, fingerprint)
        host = Host(host_id, role, request.host_name[:255], fingerprint, int(time.time() * 1000))
        await remember_host(self._storage, host)
        issued = self._authority.issue_host(
            public_key, role=role, host_id=host_id, lifetime_s=self._transport.host_certificate_lifetime_s
        )
        reply = join_pb2.EnrolReply(
            epoch=self._epoch(),
            host_id=host_id,
            role=role.value,
            certificate_pem=issued.pem,
            ca_pem=self._authority.ca_pem,
            coordinator_addrs=self._addresses(),
            cluster=self._authority.cluster,
        )
        if role is Role.COORDINATOR:
            reply.issuer_key_pem, reply.issuer_pem = self._authority.delegate(host_id)
        log.info("host_joined", host=host_id, role=role, name=host.name, peer=who)
        return reply


class CertificatesService(join_pb2_grpc.CertificatesServicer):
    """Issues certificates to hosts: those of their processes, and renewals of their own."""

    def __init__(
        self, storage: Storage, authority: Authority, transport: TransportSection, epoch: Callable[[], int]
    ) -> None:
        self._storage = storage
        self._authority = authority
        self._transport = transport
        self._epoch = epoch

    async def Issue(self, request: join_pb2.IssueRequest, context: Any) -> join_pb2.IssueReply:
        return await _answer(context, request, lambda: self._issue(request, context))

    async def _issue(self, request: join_pb2.IssueRequest, context: Any) -> join_pb2.IssueReply:
        buyer = caller(context)
        host = await find_host(self._storage, buyer.host_id) if buyer.host_id else None
        if host is None or buyer.cluster != self._authority.cluster:
            raise AuthError("The caller is no host of this cluster; run `join` with a token first.")
        if host.revoked:
            raise AuthError(f"Host {host.id} was revoked; join it again with a new token.")
        public_key = keys.requested_key(request.csr_pem)
        if isinstance(buyer, Enrolment) and not request.incarnation:
            if keys.fingerprint(public_key) != host.key:
                raise AuthError("A host's certificate is renewed for the key that it joined with.")
            issued = self._authority.issue_host(
                public_key,
                role=buyer.role,
                host_id=host.id,
                lifetime_s=self._transport.host_certificate_lifetime_s,
            )
        else:
            incarnation = check_ulid(request.incarnation, "incarnation")
            if not isinstance(buyer, Enrolment) and buyer.id != incarnation:
                raise AuthError(f"{buyer.role} {buyer.id} may renew its own certificate, not that of {incarnation}.")
            lifetime_s = self._transport.certificate_lifetime_s
            await claim_incarnation(self._storage, incarnation, host.id, time.time() + lifetime_s)
            issued = self._authority.issue_process(
                public_key,
                role=buyer.role,
                incarnation=incarnation,
                lifetime_s=lifetime_s,
                host_id=host.id,
            )
        return join_pb2.IssueReply(
            epoch=self._epoch(), certificate_pem=issued.pem, not_after_ms=int(issued.not_after * 1000)
        )
