"""Joins a cluster: checks its CA against the token before it sends the token.

The first connection trusts whatever certificate the other side shows, and fetches the CA; nothing secret is sent. The
second one trusts that CA alone, after its hash was found equal to the one inside the token.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_chain, wait_fixed

from rollout.model.errors import AuthError, ConfigError, ProtocolError, StateError, UnavailableError
from rollout.security import files, keys
from rollout.security.roles import Role
from rollout.security.tokens import Token, parse_token
from rollout.wire.channel import Address, open_channel, parse_address
from rollout.wire.errors import error_of
from rollout.wire.v1 import join_pb2, join_pb2_grpc

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Joined:
    cluster: str
    role: Role
    host_id: str
    coordinator_addrs: tuple[str, ...]
    tls_dir: Path

    def told(self, tls_dir: Path) -> str:
        """Return the message for the user; `tls_dir` is as they wrote it."""
        return (
            f'joined cluster "{self.cluster}" as {self.role}; this host\'s id there is {self.host_id}\n'
            f"this host's certificate and private key are in {tls_dir}"
        )


async def join(address: str, token: str, tls_dir: Path, host_name: str = "") -> Joined:
    """Enrol this host and write its identity to `tls_dir`; repeating it renews the identity.

    Raises ConfigError if `token` is invalid or mistyped, or `tls_dir` belongs to something else; AuthError if the
    cluster refuses the token, or if the CA is not the one it was made for (then nothing was written, and the token was
    not sent); UnavailableError if nothing responds.
    """
    wanted = parse_token(token)
    target = parse_address(address, "--coordinator", need_port=True)
    tls_dir = files.expand(tls_dir)
    if files.read(tls_dir / files.CA_KEY) is not None:
        raise ConfigError(
            f"{tls_dir} holds a CA key: it is the home of a cluster of its own; join with another tls_dir"
        )
    ca_pem = await _fetch_authority(target, wanted)
    key_pem = files.read(tls_dir / files.HOST_KEY)
    try:
        reply = await _enrol(target, ca_pem, wanted, _keep_key(tls_dir, key_pem), host_name)
    except StateError:
        if key_pem is None:
            raise
        # This key was revoked. The token allows a host in, so it comes back as a new one.
        reply = await _enrol(target, ca_pem, wanted, _keep_key(tls_dir, None), host_name)
    return _store(tls_dir, ca_pem, reply)


def _keep_key(tls_dir: Path, pem: bytes | None) -> bytes:
    """Save the key before it is enrolled: if the reply is lost, the next try is the same host and costs no second
    use."""
    if pem is None:
        pem = keys.key_pem(keys.new_key())
        files.write_atomic(tls_dir / files.HOST_KEY, pem, 0o600)
    return pem


async def _fetch_authority(target: Address, token: Token) -> bytes:
    leaf = await _shown_certificate(target)
    try:
        reply: join_pb2.AuthorityReply = await _call(target, leaf, "Authority", join_pb2.AuthorityRequest(epoch=0))
        root = x509.load_pem_x509_certificate(reply.ca_pem)
    except (UnavailableError, ProtocolError) as error:
        raise UnavailableError(
            f"{target} does not serve joining ({error}); give the address of [transport] join_addr, not listen_addr"
        ) from error
    except ValueError as error:
        raise AuthError(f"{target} sent no certificate as its CA; the token was not shown to it.") from error
    if keys.ca_hash(root) != token.ca_hash:
        raise AuthError(
            f"{target} presents another CA than the one this token was made for: a different cluster, or somebody "
            "is in between. Nothing was written and the token was not shown to it."
        )
    return keys.certificate_pem(root)


@retry(
    retry=retry_if_exception_type((ConnectionResetError, ConnectionAbortedError)),
    wait=wait_chain(wait_fixed(0.2), wait_fixed(0.5), wait_fixed(1.0)),
    stop=stop_after_attempt(4),
    reraise=True,
)
async def _opened(target: Address, context: ssl.SSLContext) -> asyncio.StreamWriter:
    """Connect, and retry if the other end closes at once: among hundreds of silent connections, a new one may be closed
    as one of them."""
    return (await asyncio.open_connection(target.host, target.port, ssl=context))[1]


async def _shown_certificate(target: Address) -> bytes:
    """Return the certificate shown at `target`, unverified."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer = await _opened(target, context)
    except TimeoutError as error:
        raise UnavailableError(
            f"{target} did not answer within {TIMEOUT_S:.0f} s; check address and firewall"
        ) from error
    except (OSError, ssl.SSLError) as error:
        raise UnavailableError(
            f"cannot reach {target} ({str(error) or 'it does not speak TLS'}); check the address, and that [transport] "
            "join_addr is set there"
        ) from error
    try:
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


async def _enrol(target: Address, ca_pem: bytes, token: Token, key_pem: bytes, host_name: str) -> join_pb2.EnrolReply:
    key = keys.load_key(key_pem, files.HOST_KEY)
    csr = keys.signing_request(key)
    request = join_pb2.EnrolRequest(epoch=0, token=token.secret, csr_pem=csr, host_name=host_name[:255])
    reply: join_pb2.EnrolReply = await _call(target, ca_pem, "Enrol", request)
    certificate = keys.load_chain(reply.certificate_pem, "the reply")[0]
    if certificate.public_key() != key.public_key():
        raise ProtocolError("The coordinator sent a certificate for another key; try again.")
    return reply


async def _call(target: Address, roots: bytes, method: str, request: Any) -> Any:
    async with open_channel(str(target), grpc.ssl_channel_credentials(roots)) as channel:
        try:
            return await getattr(join_pb2_grpc.JoinStub(channel), method)(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failed:
            raise error_of(failed) from failed


def _store(tls_dir: Path, ca_pem: bytes, reply: join_pb2.EnrolReply) -> Joined:
    if reply.role == Role.COORDINATOR:
        files.write_atomic(tls_dir / files.ISSUER_KEY, reply.issuer_key_pem, 0o600)
        files.write_atomic(tls_dir / files.ISSUER, reply.issuer_pem)
    files.write_atomic(tls_dir / files.CA, ca_pem)
    files.write_atomic(tls_dir / files.HOST, reply.certificate_pem)
    joined = {
        "cluster": reply.cluster,
        "role": reply.role,
        "host_id": reply.host_id,
        "coordinator_addrs": list(reply.coordinator_addrs),
    }
    files.write_joined(tls_dir, joined)
    return Joined(reply.cluster, Role(reply.role), reply.host_id, tuple(reply.coordinator_addrs), tls_dir)
