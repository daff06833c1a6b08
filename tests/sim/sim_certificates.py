"""Certificates of simulated processes: real X.509, made once a process and identity, since a seed has no time for it."""

from __future__ import annotations

import datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID
from rollout.model.ids import make_ulid
from rollout.security.keys import certificate_pem, new_key
from rollout.security.roles import uri

CLUSTER = "sim"
_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


def ulid(number: int) -> str:
    """The same in every seed and process."""
    return make_ulid(1_700_000_000_000, number.to_bytes(10, "big"))


@lru_cache(maxsize=1)
def _key() -> object:
    return new_key()


@lru_cache(maxsize=512)
def pem(role: str, identity: str) -> bytes:
    """A self-signed certificate: TLS verifies the chain before the product sees it, and TLS is not simulated."""
    key = _key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sim")])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri(CLUSTER, role, identity))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())  # type: ignore[attr-defined]
        .serial_number(1)
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    return certificate_pem(certificate)


class SimCredentials:
    """What links and connections use of `Credentials`."""

    generation = 1
    not_after = _END.timestamp()

    def __init__(self, role: str, identity: str) -> None:
        self.pem = pem(role, identity)

    def renew_due(self, now: float) -> bool:
        return False

    def channel_credentials(self) -> SimCredentials:
        return self
