"""Check of the services' endpoints: names, connections and TLS, before any credentials are used."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rollout.cli.cloud_doctor.check import Passed, Reached
from rollout.model.errors import UnavailableError

LIMIT_S = 5.0


async def reachability(endpoints: Mapping[str, str], reached: Reached) -> Passed:
    """Connect to `endpoints` (URLs by service). Raises UnavailableError with each unreachable service and the
    reason."""
    whys = await asyncio.gather(*(_why(url) for url in endpoints.values()))
    reached.failed.update({name: why for name, why in zip(endpoints, whys, strict=True) if why})
    if reached.failed:
        names: dict[str, list[str]] = {}  # of an endpoint that several share, once
        for name, why in reached.failed.items():
            names.setdefault(why, []).append(name)
        raise UnavailableError("; ".join(f"{', '.join(those)}: {why}" for why, those in names.items()))
    return Passed(", ".join(sorted({urlsplit(url).netloc for url in endpoints.values()})))


async def _why(url: str) -> str:
    """Return why the URL cannot be reached, or an empty string."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        tls = _context() if parts.scheme == "https" else None
    except OSError as error:
        return (
            f"{_authorities()}, which AWS_CA_BUNDLE or SSL_CERT_FILE names, cannot be read as certificates: "
            f"{error.strerror or error}; correct the variable, or unset it"
        )
    through = ""
    proxy = getproxies().get(parts.scheme, "")
    if proxy and not proxy_bypass(host):
        through = f" (the proxy of {parts.scheme.upper()}_PROXY)"
        at = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        try:
            host, port, tls = at.hostname or "", at.port or 80, None
        except ValueError:
            return f"{parts.scheme.upper()}_PROXY is no URL with a host and a port up to 65535: correct it, or unset it"
    where = f"{host}:{port}{through}"
    try:
        async with asyncio.timeout(LIMIT_S):
            _, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=host if tls else None)
    except socket.gaierror:
        return f"there is no host {host}{through}: check [cloud] region, endpoint_url, and the name server of this host"
    except TimeoutError:
        return (
            f"{where} does not answer within {LIMIT_S:g} s: check firewalls and security groups, and that a private "
            "network has a way out or an endpoint of its own for this service"
        )
    except ssl.SSLError as error:
        return (
            f"{where}: TLS fails ({error.reason or error}): AWS_CA_BUNDLE or SSL_CERT_FILE names the file of a private "
            "authority; http:// or https:// in endpoint_url?"
        )
    except OSError as error:
        return f"{where}: {error.strerror or error}: check [cloud] endpoint_url, and that something listens there"
    writer.close()
    return ""


def _context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=_authorities())


def _authorities() -> str | None:
    """Return the file of CA certificates that an environment variable names."""
    return os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
