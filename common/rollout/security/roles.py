"""The identity of a caller, in its certificate.

A certificate names its holder in SAN URIs: `spiffe://<cluster>/<role>/<ulid>` for a process, and
`spiffe://<cluster>/host/<ulid>` for its host. A host's own certificate has the second and
`spiffe://<cluster>/enrolled/<role>`: it buys process certificates of that role and grants nothing else.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from cryptography import x509

from rollout.model.errors import AuthError
from rollout.model.ids import is_ulid


class Role(StrEnum):
    COORDINATOR = "coordinator"
    WORKER = "worker"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Peer:
    """A process. `id` is its incarnation; `host_id` is empty if the process issued its own certificate."""

    role: Role
    id: str
    host_id: str
    cluster: str
    not_after: float = float("inf")  # unix seconds


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A host, and the only role that its processes may have."""

    role: Role
    host_id: str
    cluster: str
    not_after: float = float("inf")


_URI = re.compile(r"^spiffe://([a-z0-9][a-z0-9.-]{0,62})/([a-z]+)/([A-Za-z0-9]+)$")


def uri(cluster: str, kind: str, name: str) -> str:
    return f"spiffe://{cluster}/{kind}/{name}"


def identity_of(certificate: x509.Certificate) -> Peer | Enrolment:
    """Return the identity. Raises AuthError unless the SAN URIs name exactly one identity of one cluster."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise AuthError("The certificate carries no SAN URI, so it says no identity.") from None
    found: dict[str, str] = {}
    clusters: set[str] = set()
    for text in names.get_values_for_type(x509.UniformResourceIdentifier):
        match = _URI.match(text)
        if match is None or match[2] in found:
            raise AuthError(f"The certificate's SAN URI {text!r} is not an identity of this product.")
        clusters.add(match[1])
        found[match[2]] = match[3]
    not_after = certificate.not_valid_after_utc.timestamp()
    host_id = found.pop("host", "")
    enrolled = found.pop("enrolled", "")
    roles = [role for role in Role if role in found]
    if len(clusters) != 1 or (host_id and not is_ulid(host_id)) or len(roles) != len(found):
        raise AuthError("The certificate's SAN URIs do not say one identity of one cluster.")
    if enrolled and host_id and not roles and enrolled in set(Role):
        return Enrolment(Role(enrolled), host_id, clusters.pop(), not_after)
    if enrolled or len(roles) != 1 or not is_ulid(found[roles[0]]):
        raise AuthError("The certificate's SAN URIs do not say one identity of one cluster.")
    return Peer(roles[0], found[roles[0]], host_id, clusters.pop(), not_after)


@lru_cache(maxsize=4096)
def _identity_of_pem(pem: bytes) -> Peer | Enrolment:
    return identity_of(x509.load_pem_x509_certificate(pem))


def caller(context: Any) -> Peer | Enrolment:
    """Return the identity of a call's peer, whose chain TLS has verified. Raises AuthError if there is none, or once it
    has expired: TLS checks dates only when a connection is made, and connections live long."""
    pems = context.auth_context().get("x509_pem_cert")
    if not pems:
        raise AuthError("The caller presented no client certificate; this port speaks mutual TLS only.")
    try:
        identity = _identity_of_pem(pems[0])
    except ValueError as error:
        raise AuthError(f"The caller's certificate cannot be read: {error}") from error
    if identity.not_after < time.time():
        raise AuthError("The caller's certificate has expired; renew it and connect again.")
    return identity


def peer_of(context: Any) -> Peer:
    """Return the calling process. Raises AuthError for a host's certificate, which can only buy others."""
    identity = caller(context)
    if isinstance(identity, Enrolment):
        raise AuthError(
            f"Host {identity.host_id} called with its host certificate; it must first buy a certificate for a process."
        )
    return identity


def require(context: Any, *roles: Role, id: str | None = None, cluster: str | None = None) -> Peer:
    """Return the calling process. Raises AuthError unless it has one of `roles` and, if given, that id and cluster."""
    peer = peer_of(context)
    if roles and peer.role not in roles:
        allowed = " or ".join(roles)
        raise AuthError(f"This call is for {allowed}; the caller's certificate says {peer.role} {peer.id}.")
    if id is not None and peer.id != id:
        raise AuthError(f"The message claims to come from {id!r}, the caller's certificate says {peer.id}.")
    if cluster is not None and peer.cluster != cluster:
        raise AuthError(f"The caller belongs to cluster {peer.cluster!r}, this is {cluster!r}.")
    return peer
