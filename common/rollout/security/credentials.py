"""A process's own certificate: obtained at start, renewed at half its life, never written to disk."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog
from cryptography.hazmat.primitives.asymmetric import ec

from rollout.model.errors import AuthError, ConfigError, FencedError, RolloutError, UnavailableError
from rollout.security import files, keys
from rollout.security.authority import CLOCK_DIFFERENCE, Authority, Issued
from rollout.security.roles import Enrolment, Role, identity_of
from rollout.wire.answers import REFUSED_S, WRONG_PEER_S, Answers, no_answer
from rollout.wire.channel import open_channel
from rollout.wire.errors import error_of
from rollout.wire.silence import telling
from rollout.wire.v1 import join_pb2, join_pb2_grpc

log = structlog.get_logger()

CALL_TIMEOUT_S = 10.0
Trouble = Callable[[RolloutError | None, float], None]
"""Called with a failure and the number of seconds it has lasted, and with None when it ends."""
Issue = Callable[[ec.EllipticCurvePrivateKey], Awaitable[Issued]]


class Host:
    """The identity that `join` wrote to `tls_dir`."""

    def __init__(self, tls_dir: Path, cluster: str, role: Role) -> None:
        self._dir = tls_dir
        key, pem = files.read(tls_dir / files.HOST_KEY), files.read(tls_dir / files.HOST)
        ca_pem = files.read(tls_dir / files.CA)
        if key is None or pem is None or ca_pem is None:
            program = {Role.COORDINATOR: "rollout-coordinator", Role.WORKER: "rollout-worker"}.get(role, "rollout")
            raise ConfigError(
                f"{tls_dir} holds neither a CA key nor a host certificate; run `{program} join --coordinator "
                f"HOST:JOIN_PORT --token-file FILE --tls-dir {tls_dir}`, with a token from `rollout-coordinator token "
                f"create --role {role}`"
            )
        self.ca_pem = ca_pem
        self._key_pem = key
        self._key = keys.load_key(key, str(tls_dir / files.HOST_KEY))
        self._use(pem)
        if self.identity.cluster != cluster:
            raise ConfigError(
                f"{tls_dir} joined cluster {self.identity.cluster!r}, transport.cluster is {cluster!r}: change the "
                "setting, or join the other cluster with another tls_dir"
            )
        if self.identity.role is not role:
            raise ConfigError(
                f"{tls_dir} joined as {self.identity.role}, but this process is of role {role}: join with a token of "
                f"role {role} and another tls_dir"
            )

    def _use(self, pem: bytes) -> None:
        certificate = keys.load_chain(pem, str(self._dir / files.HOST))[0]
        identity = identity_of(certificate)
        if not isinstance(identity, Enrolment):
            raise ConfigError(f"{self._dir / files.HOST} is not a host's certificate; join again")
        self._pem = pem
        self.identity = identity
        begin = (certificate.not_valid_before_utc + CLOCK_DIFFERENCE).timestamp()
        self._renew_at = (begin + identity.not_after) / 2

    def addresses(self) -> list[str]:
        """Return the addresses of coordinators, as of when this host joined."""
        return [str(address) for address in files.joined(self._dir).get("coordinator_addrs", [])]

    async def buy(
        self,
        addresses: Sequence[str],
        key: ec.EllipticCurvePrivateKey,
        incarnation: str,
        patience_s: float,
        on_trouble: Trouble | None = None,
    ) -> Issued:
        """Buy a process's certificate from the leader. The host's own certificate is renewed at half its life, too."""
        if self.identity.not_after < time.time():
            raise ConfigError(
                f"the host certificate in {self._dir} has expired: this host was off for too long; join again with a "
                "new token"
            )
        if self._renew_at <= time.time():
            try:
                renewed = await self._call(addresses, self._key, "", patience_s, on_trouble)
            except UnavailableError as error:  # there is half a lifetime left for it
                log.warning("host_certificate_not_renewed", reason=str(error))
            else:
                files.write_atomic(self._dir / files.HOST, renewed.pem)
                self._use(renewed.pem)
                log.info("host_certificate_renewed", host=self.identity.host_id, not_after=renewed.not_after)
        return await self._call(addresses, key, incarnation, patience_s, on_trouble)

    async def _call(
        self,
        addresses: Sequence[str],
        key: ec.EllipticCurvePrivateKey,
        incarnation: str,
        patience_s: float,
        on_trouble: Trouble | None,
    ) -> Issued:
        tried = list(dict.fromkeys([*addresses, *self.addresses()]))
        if not tried:
            raise ConfigError("transport.coordinator_addrs is empty: name the coordinators")
        request = join_pb2.IssueRequest(epoch=0, incarnation=incarnation, csr_pem=keys.signing_request(key))
        began = time.monotonic()
        pause = 0.1
        answers = Answers()
        while True:
            error: RolloutError | None = None
            for address in list(tried):
                try:
                    with telling(on_trouble or _unheard, address):
                        issued = await self._ask(address, request)
                except RolloutError as failed:  # also of one that cannot reach its database, or was just deposed
                    if not failed.retryable and not isinstance(failed, FencedError):
                        raise
                    error = failed
                    answers.note(address, failed)
                    leader = str(failed.context.get("leader", ""))
                    if leader and leader not in tried:
                        tried.insert(0, leader)
                else:
                    if on_trouble is not None:
                        on_trouble(None, time.monotonic() - began)
                    return issued
            assert error is not None
            waited = time.monotonic() - began
            if answers.wrong_peer(tried) and waited >= WRONG_PEER_S:
                raise AuthError(f"{answers.text()}. Join that cluster with a new token and another directory")
            limit_s = min(patience_s, REFUSED_S) if answers.refused(tried) else patience_s
            if waited + pause > limit_s:
                raise no_answer(answers, tried, error, waited)
            if on_trouble is not None:
                on_trouble(UnavailableError(answers.text(), tries_s=limit_s), waited)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 1.0)  # so that a failure is told of, after two seconds, before the last

    async def _ask(self, address: str, request: join_pb2.IssueRequest) -> Issued:
        mutual = grpc.ssl_channel_credentials(self.ca_pem, self._key_pem, self._pem)
        async with open_channel(address, mutual) as channel:
            stub: Any = join_pb2_grpc.CertificatesStub(channel)
            try:
                reply: join_pb2.IssueReply = await stub.Issue(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as failed:
                raise error_of(failed) from failed
        return Issued(reply.certificate_pem, reply.not_after_ms / 1000)


class Credentials:
    """TLS credentials of a process, as client and server. `generation` grows with each renewal: a server uses the new
    certificate by itself, a client must rebuild its channel."""

    def __init__(self, role: Role, incarnation: str, host_id: str, ca_pem: bytes, issue: Issue) -> None:
        self.role = role
        self.incarnation = incarnation
        self.host_id = host_id
        self.ca_pem = ca_pem
        self.generation = 0
        self.not_after = 0.0
        self._obtained = 0.0
        self._issue = issue
        self._key_pem = b""
        self._chain_pem = b""
        self._lock = asyncio.Lock()

    @classmethod
    async def obtain(
        cls,
        *,
        tls_dir: Path,
        cluster: str,
        role: Role,
        incarnation: str,
        lifetime_s: float,
        addresses: Sequence[str] = (),
        names: Sequence[str] = (),
        patience_s: float = 30.0,
        on_trouble: Trouble | None = None,
    ) -> Credentials:
        """Issue a certificate if `tls_dir` has the signing key, else buy one with the host's.

        `names` are for a coordinator's certificate. `addresses` are coordinators to buy from, tried for `patience_s`.
        Raises ConfigError if this host has joined no cluster or another one, UnavailableError if no coordinator
        responds, AuthError if they refuse.
        """
        tls_dir = files.expand(tls_dir)
        # A coordinator's first start makes the CA; anybody else must have joined.
        find = Authority.load_or_create if role is Role.COORDINATOR else Authority.load
        authority = find(tls_dir, cluster)
        if authority is not None:
            host_id = _host_id(tls_dir)

            async def issue(key: ec.EllipticCurvePrivateKey) -> Issued:
                return authority.issue_process(
                    key.public_key(),
                    role=role,
                    incarnation=incarnation,
                    lifetime_s=lifetime_s,
                    host_id=host_id,
                    names=names,
                )

            found = cls(role, incarnation, host_id, authority.ca_pem, issue)
        else:
            host = Host(tls_dir, cluster, role)

            async def buy(key: ec.EllipticCurvePrivateKey) -> Issued:
                return await host.buy(addresses, key, incarnation, patience_s, on_trouble)

            found = cls(role, incarnation, host.identity.host_id, host.ca_pem, buy)
        await found.renew()
        return found

    def renew_due(self, now: float) -> bool:
        """Return whether half of the certificate's life is over at `now` (unix seconds)."""
        return now >= (self._obtained + self.not_after) / 2

    async def renew(self) -> None:
        """Get a new key and certificate. Raises the errors of `obtain`; the old certificate then stays in use."""
        async with self._lock:
            key = keys.new_key()
            started = time.time()
            issued = await self._issue(key)
            self._key_pem, self._chain_pem = keys.key_pem(key), issued.pem
            self._obtained, self.not_after = started, issued.not_after
            self.generation += 1

    async def keep_renewed(self, on_renewed: Callable[[], None] | None = None) -> None:
        """Renew whenever due, until cancelled; `on_renewed` is called after each renewal. Raises AuthError if this host
        has been excluded for good."""
        while True:
            due = (self._obtained + self.not_after) / 2 - time.time()
            await asyncio.sleep(min(max(due, 0.05), 60.0))  # a clock that was set must not delay it for hours
            if not self.renew_due(time.time()):
                continue
            try:
                await self.renew()
            except AuthError:
                raise
            except RolloutError as error:
                log.warning("certificate_not_renewed", reason=str(error), not_after=self.not_after)
                await asyncio.sleep(1.0)
                continue
            log.debug("certificate_renewed", generation=self.generation, not_after=self.not_after)
            if on_renewed is not None:
                on_renewed()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return channel credentials of the current generation."""
        return grpc.ssl_channel_credentials(self.ca_pem, self._key_pem, self._chain_pem)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return server credentials for mutual TLS. New connections use the newest certificate, open ones are not
        affected."""
        return self._server(mutual=True)

    def join_server_credentials(self) -> grpc.ServerCredentials:
        """Return server credentials without client authentication, for `join_addr`."""
        return self._server(mutual=False)

    def _server(self, *, mutual: bool) -> grpc.ServerCredentials:
        if self.role is not Role.COORDINATOR:
            raise ConfigError(f"a {self.role}'s certificate cannot serve")
        served = 0

        def configuration() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(self._key_pem, self._chain_pem)], self.ca_pem if mutual else None
            )

        def fetch() -> Any:  # None: as before
            nonlocal served
            if served == self.generation:
                return None
            served = self.generation
            return configuration()

        served = self.generation
        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=mutual)


def _unheard(error: RolloutError | None, seconds: float) -> None:
    """Ignore failures."""


def _host_id(tls_dir: Path) -> str:
    """Return the host id of a coordinator that joined, or "" if it has the CA itself."""
    pem = files.read(tls_dir / files.HOST)
    if pem is None:
        return ""
    identity = identity_of(keys.load_chain(pem, str(tls_dir / files.HOST))[0])
    return identity.host_id
