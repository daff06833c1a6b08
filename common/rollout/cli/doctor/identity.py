"""Check of the certificates in the TLS directory: whose they are, and when they expire."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rollout.cli.doctor.finding import Finding, fault, ok, warning
from rollout.security import files

WARN_SHARE = 0.2


async def identity(tls_dir: Path) -> list[Finding]:
    """Check the certificates. Raises ConfigError if others may read a key or a file is damaged."""
    return await asyncio.to_thread(_identity, tls_dir)


def _identity(tls_dir: Path) -> list[Finding]:
    joined = files.joined(tls_dir)
    own = files.read(tls_dir / files.CA_KEY) is not None
    if not joined and not own:
        return [
            ok(
                "certificates",
                f"{tls_dir} holds none: commands start a cluster of their own on this machine, or join one first",
            )
        ]
    found: list[Finding] = []
    if own:
        found.append(ok("certificates", f"{tls_dir} is the home of a cluster: it issues certificates of every role"))
    if joined:
        addresses = ", ".join(str(address) for address in joined.get("coordinator_addrs", [])) or "no address"
        found.append(
            ok(
                "certificates",
                f"{tls_dir} joined cluster {joined.get('cluster')} as {joined.get('role')} "
                f"(host {joined.get('host_id')}, {addresses})",
            )
        )
    for what, name in (("authority", files.CA), ("host certificate", files.HOST), ("issuer", files.ISSUER)):
        pem = files.read(tls_dir / name)
        if pem is not None:
            found.append(_lifetime(what, tls_dir / name, pem))
    return found


def _lifetime(what: str, path: Path, pem: bytes) -> Finding:
    from rollout.security import keys  # brings cryptography

    certificate = keys.load_chain(pem, str(path))[0]
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    name, left = f"{what} ends", end - time.time()
    shown = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, in {left / 86400:,.0f} days"
    if left <= 0:
        return fault(name, f"it ended at {shown.partition(',')[0]} ({path})", "join again, with a new token")
    if begin > time.time() + 60:
        return fault(name, f"it begins only at {certificate.not_valid_before_utc} ({path})", "set this machine's clock")
    if left < WARN_SHARE * (end - begin):
        return warning(
            name, f"{shown} ({path})", "a program of this host renews it while it runs: run one, or join again"
        )
    return ok(name, shown)
