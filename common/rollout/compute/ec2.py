"""EC2: the instance's properties, and the notice of its interruption, from the metadata service, version 2 only.

Interruption: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, two minutes
ahead, to be polled every 5 s. Rebalance recommendation: a hint that may come long before, or never.
"""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

import structlog

from rollout.compute import local
from rollout.compute.local import LocalCompute
from rollout.compute.metadata import Answer, Metadata, SilentError, ec2_disabled, ec2_endpoint
from rollout.compute.port import Host, Preemption
from rollout.compute.watching import first, gpu_type, labelled, tried
from rollout.config.cloud import CloudSection
from rollout.config.settings import ComputeSection
from rollout.model.errors import ConfigError, UnavailableError

log = structlog.get_logger()

LEAD_S, BUDGET_S = 120.0, 60.0
POLL_S = 5.0
TOKEN_S = 21_600
"""Requested lifetime of a token, the maximum; it is renewed well before."""
TOKEN, TTL = "X-aws-ec2-metadata-token", "X-aws-ec2-metadata-token-ttl-seconds"
HOP_LIMIT = (
    "in a container that is the hop limit of 1, under which the answer to the token request does not arrive: aws ec2 "
    "modify-instance-metadata-options --instance-id ID --http-tokens required --http-put-response-hop-limit 2 "
    "(HttpPutResponseHopLimit = 2 in a launch template)"
)
FAMILIES = {
    "p3.": "nvidia-v100", "p3dn.": "nvidia-v100", "p4d.": "nvidia-a100", "p4de.": "nvidia-a100-80gb",
    "p5.": "nvidia-h100", "p5e.": "nvidia-h200", "p5en.": "nvidia-h200", "p6-b200.": "nvidia-b200",
    "g4dn.": "nvidia-t4", "g5.": "nvidia-a10g", "g6.": "nvidia-l4", "g6e.": "nvidia-l40s",
}  # fmt: skip
"""https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing"""


def open_compute(section: ComputeSection, cloud: CloudSection) -> Ec2Compute:
    return Ec2Compute(
        local.open_compute(section, cloud), Metadata(ec2_endpoint()), drain_on_rebalance=section.drain_on_rebalance
    )


class Ec2Compute:
    def __init__(
        self, here: LocalCompute, metadata: Metadata, *, drain_on_rebalance: bool = False, poll_s: float = POLL_S
    ) -> None:
        self._local = here
        self._metadata = metadata
        self._drain_on_rebalance = drain_on_rebalance
        self._poll_s = poll_s
        self._token = ""
        self._renew_at = 0.0
        self._recommended = False

    async def why_silent(self) -> str:
        """Return why the metadata service does not respond, or ""."""
        if ec2_disabled():
            return "AWS_EC2_METADATA_DISABLED is true"
        try:
            await self._get("/latest/meta-data/instance-id")
        except UnavailableError as error:
            return error.message
        return ""

    async def inventory(self) -> Host:
        """Return the machine, with its location as labels. Raises ConfigError if the metadata service does not
        respond."""
        host = await self._local.inventory()
        try:
            document, lifecycle = await tried(self._facts)
        except UnavailableError as error:
            raise ConfigError(f'[compute] backend = "ec2": {error.message}; "local" runs anywhere') from None
        kind = str(document.get("instanceType", ""))
        labels = {
            "cloud": "aws",
            "region": str(document.get("region", "")),
            "zone": str(document.get("availabilityZone", "")),
            "instance_type": kind,
            "lifecycle": lifecycle.text if lifecycle is not None else "",
            "gpu_type": gpu_type(kind, FAMILIES, host.gpus),
        }
        return labelled(host, labels)

    async def _facts(self) -> tuple[dict[str, Any], Answer | None]:
        document = _object(await self._get("/latest/dynamic/instance-identity/document"))
        return document, await self._get("/latest/meta-data/instance-life-cycle")

    async def preemption(self) -> Preemption:
        return await first(self._local.preemption(), self._watch())

    async def _watch(self) -> Preemption:
        told = False
        while True:
            try:
                notice = await self.notice() or await self._rebalance()
            except UnavailableError as error:
                if not told:
                    log.warning("metadata_unanswered", error=error.message)
                told = True
            else:
                told = False
                if notice is not None:
                    return notice
            await asyncio.sleep(self._poll_s)

    async def notice(self) -> Preemption | None:
        """Return the notice of an interruption, if there is one. Raises UnavailableError if that is unknown."""
        answer = await self._get("/latest/meta-data/spot/instance-action")
        if answer is None:
            return None
        told = _object(answer)
        action, at = str(told.get("action", "")), str(told.get("time", ""))
        left_s = min(LEAD_S, max(0.0, _left_s(at, answer)))
        reason = f"EC2 will {action or 'interrupt'} this spot instance at {at}"
        return Preemption(reason, left_s, min(BUDGET_S, left_s / 2))

    async def _rebalance(self) -> Preemption | None:
        """Return a hint that the instance is more likely than others to be interrupted."""
        if self._recommended or await self._get("/latest/meta-data/events/recommendations/rebalance") is None:
            return None
        self._recommended = True
        log.info("rebalance_recommended", drains=self._drain_on_rebalance)
        reason = "EC2 recommends to rebalance: an interruption is likely"
        return Preemption(reason, LEAD_S, BUDGET_S) if self._drain_on_rebalance else None

    async def _get(self, path: str) -> Answer | None:
        """Return an answer, or None for 404. Raises UnavailableError without an answer, or for another status."""
        answer = await self._metadata.ask("GET", path, {TOKEN: await self._fresh_token()})
        if answer.status == 401:  # the service has forgotten it
            self._renew_at = 0.0
            answer = await self._metadata.ask("GET", path, {TOKEN: await self._fresh_token()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise UnavailableError(f"the metadata service answers HTTP {answer.status} for {path}")
        return answer

    async def _fresh_token(self) -> str:
        now = time.monotonic()
        if now < self._renew_at:
            return self._token
        try:
            answer = await self._metadata.ask("PUT", "/latest/api/token", {TTL: str(TOKEN_S)})
        except SilentError as error:
            raise SilentError(f"{error.message}: {HOP_LIMIT}") from None
        if answer.status == 403:
            raise UnavailableError(
                "the metadata service refuses (HTTP 403), so it is switched off: aws ec2 "
                "modify-instance-metadata-options --instance-id ID --http-endpoint enabled"
            )
        if answer.status != 200:
            raise UnavailableError(f"the metadata service answers HTTP {answer.status} to a request for a token")
        if not answer.text.isascii() or not answer.text.isprintable():
            raise UnavailableError("what answers at the address of the metadata service is not EC2's")
        self._token, self._renew_at = answer.text, now + 0.9 * TOKEN_S
        return self._token

    async def close(self) -> None:
        await self._metadata.close()
        await self._local.close()


def _object(answer: Answer | None) -> dict[str, Any]:
    """Parse a JSON object. Raises UnavailableError otherwise, because something else responds at that address."""
    try:
        found: Any = json.loads(answer.text) if answer is not None else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnavailableError("what answers at the address of the metadata service is not EC2's")
    return cast("dict[str, Any]", found)


def _left_s(at: str, answer: Answer) -> float:
    """Return the seconds until `at`, by the service's clock, so that a wrong local one does no harm; without it, what
    AWS promises."""
    try:
        ends = datetime.fromisoformat(at).timestamp()
        told = answer.headers.get("date")
        return ends - (parsedate_to_datetime(told).timestamp() if told else time.time())
    except ValueError:
        return LEAD_S
