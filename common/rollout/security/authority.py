"""The cluster's certificate authority, and what it signs.

The first coordinator creates a CA in its `tls_dir`. A coordinator that joined later has an intermediate instead. Both
issue certificates, and everyone trusts the one `ca.pem`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rollout.model.errors import ConfigError
from rollout.security import files, keys
from rollout.security.roles import Role, uri
from rollout.wire.channel import COORDINATOR_NAME

log = structlog.get_logger()

CLOCK_DIFFERENCE = timedelta(minutes=5)
"""Certificates are valid from this long ago, for hosts whose clocks are slow."""

CA_LIFETIME = timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Issued:
    pem: bytes  # the certificate, then its issuers up to, without, the root
    not_after: float  # unix seconds


class Authority:
    """Signs with the CA's key or an intermediate's. Obtain one with `load` or `load_or_create`."""

    def __init__(
        self,
        cluster: str,
        root: x509.Certificate,
        chain: list[x509.Certificate],
        key: ec.EllipticCurvePrivateKey,
    ) -> None:
        self.cluster = cluster
        self.root = root
        self._chain = chain  # issuer first; empty: the root itself signs
        self._issuer = chain[0] if chain else root
        self._key = key

    @property
    def ca_pem(self) -> bytes:
        return keys.certificate_pem(self.root)

    @property
    def ca_hash(self) -> bytes:
        return keys.ca_hash(self.root)

    @classmethod
    def load(cls, tls_dir: Path, cluster: str) -> Authority | None:
        """Load the authority, or return None if `tls_dir` has no signing key. Raises ConfigError if its files do not
        match."""
        ca_pem = files.read(tls_dir / files.CA)
        if ca_pem is None:
            return None
        root = keys.load_chain(ca_pem, str(tls_dir / files.CA))[0]
        if (root_key := files.read(tls_dir / files.CA_KEY)) is not None:
            chain: list[x509.Certificate] = []
            where, key = tls_dir / files.CA_KEY, keys.load_key(root_key, str(tls_dir / files.CA_KEY))
        elif (issuer_key := files.read(tls_dir / files.ISSUER_KEY)) is not None:
            where, key = tls_dir / files.ISSUER_KEY, keys.load_key(issuer_key, str(tls_dir / files.ISSUER_KEY))
            chain = keys.load_chain(files.read(tls_dir / files.ISSUER) or b"", str(tls_dir / files.ISSUER))
        else:
            return None
        signer = chain[0] if chain else root
        if signer.public_key() != key.public_key():
            raise ConfigError(f"{where} is not the key of the certificate beside it; restore both from one backup")
        if (named := _cluster_of(root)) != cluster:
            raise ConfigError(
                f"{tls_dir} belongs to cluster {named!r}, transport.cluster is {cluster!r}: change the setting, or use "
                "another tls_dir"
            )
        return cls(cluster, root, chain, key)

    @classmethod
    def load_or_create(cls, tls_dir: Path, cluster: str, *, tell: bool = True) -> Authority:
        """Load the authority of `tls_dir`, or create it on first use; if several processes race, one creates it. `tell`
        logs it, for programs that have configured logging."""
        with files.locked(tls_dir):
            found = cls.load(tls_dir, cluster)
            if found is not None:
                return found
            if files.read(tls_dir / files.CA) is not None:
                raise ConfigError(
                    f"{tls_dir} holds {files.CA} but no key to issue with: this host joined as a worker or operator. "
                    "A coordinator needs `rollout-coordinator join` with a token of role coordinator, or a tls_dir of "
                    "its own"
                )
            # A crash after the key was written leaves a key without certificate; it is used again.
            old_key = files.read(tls_dir / files.CA_KEY)
            key = keys.load_key(old_key, str(tls_dir / files.CA_KEY)) if old_key else keys.new_key()
            root = _root(cluster, key)
            files.write_atomic(tls_dir / files.CA_KEY, keys.key_pem(key), 0o600)
            files.write_atomic(tls_dir / files.CA, keys.certificate_pem(root))
        if tell:
            log.info("dev_ca_generated", path=str(tls_dir / files.CA), note=f"Generated dev CA at {tls_dir}")
        return cls(cluster, root, [], key)

    def issue_process(
        self,
        public_key: ec.EllipticCurvePublicKey,
        *,
        role: Role,
        incarnation: str,
        lifetime_s: float,
        host_id: str = "",
        names: Iterable[str] = (),
    ) -> Issued:
        """Issue a process's certificate. `names` are DNS names and IP addresses, for coordinators only."""
        sans: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri(self.cluster, role, incarnation))]
        if host_id:
            sans.append(x509.UniformResourceIdentifier(uri(self.cluster, "host", host_id)))
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role is Role.COORDINATOR:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            sans.extend(map(_general_name, dict.fromkeys((COORDINATOR_NAME, "localhost", "127.0.0.1", "::1", *names))))
        return self._leaf(public_key, f"{role} {incarnation}", sans, usages, lifetime_s)

    def issue_host(
        self, public_key: ec.EllipticCurvePublicKey, *, role: Role, host_id: str, lifetime_s: float
    ) -> Issued:
        """Issue a host's certificate, which can only buy certificates for processes of `role`."""
        sans: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(uri(self.cluster, "host", host_id)),
            x509.UniformResourceIdentifier(uri(self.cluster, "enrolled", role)),
        ]
        return self._leaf(public_key, f"host {host_id}", sans, [ExtendedKeyUsageOID.CLIENT_AUTH], lifetime_s)

    def delegate(self, host_id: str) -> tuple[bytes, bytes]:
        """Return (key, certificates) of a new intermediate, for another coordinator."""
        key = keys.new_key()
        subject = _name(f"Rollout issuer {host_id}")
        builder = _builder(subject, self._issuer, key.public_key(), self._issuer.not_valid_after_utc)
        intermediate = _as_ca(builder).sign(self._key, hashes.SHA256())
        return keys.key_pem(key), keys.certificate_pem(intermediate, *self._chain)

    def _leaf(
        self,
        public_key: ec.EllipticCurvePublicKey,
        name: str,
        sans: list[x509.GeneralName],
        usages: list[x509.ObjectIdentifier],
        lifetime_s: float,
    ) -> Issued:
        # Certificates know whole seconds only: round up, or a lifetime of a few seconds loses a part of it.
        wanted = datetime.now(UTC) + timedelta(seconds=lifetime_s + 1)
        not_after = min(wanted.replace(microsecond=0), self._issuer.not_valid_after_utc)
        certificate = (
            _builder(_name(name), self._issuer, public_key, not_after)
            .add_extension(x509.SubjectAlternativeName(sans), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(ca=False), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(keys.certificate_pem(certificate, *self._chain), not_after.timestamp())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.split("%")[0]))
    except ValueError:
        return x509.DNSName(text)


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Certificate | None,
    public_key: ec.EllipticCurvePublicKey,
    not_after: datetime,
) -> x509.CertificateBuilder:
    """Return a builder. `issuer` None means self-signed."""
    issuer_key = public_key
    if issuer is not None:
        found = issuer.public_key()
        assert isinstance(found, ec.EllipticCurvePublicKey)
        issuer_key = found
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - CLOCK_DIFFERENCE)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _as_ca(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).add_extension(
        _key_usage(ca=True), critical=True
    )


def _root(cluster: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{cluster}")])
    subject = _name(f"Rollout CA {cluster}"[:64])
    builder = _builder(subject, None, key.public_key(), datetime.now(UTC) + CA_LIFETIME)
    return _as_ca(builder.add_extension(names, critical=False)).sign(key, hashes.SHA256())


def _cluster_of(root: x509.Certificate) -> str:
    try:
        names = root.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    found = names.get_values_for_type(x509.UniformResourceIdentifier)
    return found[0].removeprefix("spiffe://") if found else ""
