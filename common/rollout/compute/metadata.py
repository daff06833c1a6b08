"""Metadata services of cloud machines: plain HTTP at an address of the machine itself, so never through a proxy.

EC2: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html. GCE:
https://cloud.google.com/compute/docs/metadata/querying-metadata.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

import httpx2

from rollout.model.errors import UnavailableError

LINK_LOCAL = "169.254.169.254"
"""The address with both providers, and the only one of theirs in this program."""
CONNECT_S = 0.5
"""Short, because the service is on the machine itself; elsewhere nothing responds at its address."""
ANSWER_S = 2.0


def ec2_endpoint() -> str:
    """Return the endpoint like the AWS SDKs: AWS_EC2_METADATA_SERVICE_ENDPOINT, or the IPv4 address."""
    return (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or f"http://{LINK_LOCAL}").rstrip("/")


def ec2_disabled() -> bool:
    """Return whether it is disabled, like the AWS SDKs: AWS_EC2_METADATA_DISABLED=true."""
    return os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"


def gce_endpoint() -> str:
    """Return the endpoint like Google's clients: GCE_METADATA_HOST (host or host:port), or the address, which needs no
    name server."""
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP") or LINK_LOCAL
    return (host if "://" in host else f"http://{host}").rstrip("/")


class SilentError(UnavailableError):
    """The metadata service took the connection and then said nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]


class Metadata:
    """A client. `address` has no slash at its end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client: httpx2.AsyncClient | None = None

    async def ask(self, method: str, path: str, headers: Mapping[str, str], *, answer_s: float = ANSWER_S) -> Answer:
        """Send a request and return the answer with any status below 500. Raises UnavailableError without an answer or
        for a fault of the service, SilentError if it accepted the connection but did not answer in `answer_s`."""
        if self._client is None:
            # trust_env: no proxy, no .netrc.
            self._client = httpx2.AsyncClient(trust_env=False, follow_redirects=False)
        timeout = httpx2.Timeout(answer_s, connect=CONNECT_S)
        try:
            async with asyncio.timeout(CONNECT_S + answer_s):  # httpx2's limits are of silence: an answer may drip
                reply = await self._client.request(method, self.address + path, headers=dict(headers), timeout=timeout)
        except (httpx2.ReadTimeout, TimeoutError):
            raise SilentError(f"{self.address}{path} did not answer in {answer_s:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise UnavailableError(f"the metadata service at {self.address} does not answer: {why}") from None
        if reply.status_code >= 500:
            raise UnavailableError(f"the metadata service answers HTTP {reply.status_code} for {path}")
        return Answer(reply.status_code, reply.text, reply.headers)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
