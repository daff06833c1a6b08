"""Keys and signing requests: EC P-256, PKCS#8 PEM, no passphrase (files are 0600)."""

from __future__ import annotations

import hashlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rollout.model.errors import AuthError, ConfigError
from rollout.model.ids import make_ulid

_RESTORE = "restore that directory from a backup, or remove it and join again with a new token"


def _brief(error: Exception) -> str:
    """Return the message without the link to the library's documentation."""
    return str(error).split(" See https:")[0].rstrip(".")


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """Load a key. Raises ConfigError unless it is an EC key without a passphrase."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where} holds no usable private key; {_RESTORE} ({_brief(error)})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{where} holds no EC key; this product makes and uses EC P-256 keys only")
    return key


def load_chain(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"{where} holds no usable certificate; {_RESTORE} ({_brief(error)})") from error


def certificate_pem(*chain: x509.Certificate) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in chain)


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a request that proves possession of the key and asks for nothing: the issuer alone decides the content."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rollout")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a signing request. Raises AuthError unless it is EC P-256 and self-signed."""
    try:
        request = x509.load_pem_x509_csr(csr_pem)
        valid = request.is_signature_valid
        key = request.public_key()
    except Exception as error:
        raise AuthError(f"The signing request cannot be read: {error}") from error
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AuthError("The signing request must be for an EC P-256 key and signed by it.")
    return key


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return SHA-256 of the public key's SubjectPublicKeyInfo, in hex."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def host_id_of(cluster: str, role: str, key_fingerprint: str) -> str:
    """Return the host id of a key: the same key enrols as the same host, however often the reply was lost."""
    digest = hashlib.sha256(f"rollout-host-1\n{cluster}\n{role}\n{key_fingerprint}".encode()).digest()
    return make_ulid(int.from_bytes(digest[:6], "big"), digest[6:16])


def ca_hash(certificate: x509.Certificate) -> bytes:
    """Return SHA-256 of the DER form, as `openssl x509 -fingerprint -sha256` prints it."""
    return certificate.fingerprint(hashes.SHA256())
