"""Compute Engine: the machine's properties, and the notices of its end, from the metadata server.

Preemption: https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted, 30 s
ahead. Maintenance: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice. Waiting for a change:
https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import quote

import structlog

from rollout.compute import local
from rollout.compute.local import LocalCompute
from rollout.compute.metadata import ANSWER_S, Metadata, SilentError, gce_endpoint
from rollout.compute.port import Host, Preemption
from rollout.compute.watching import first, gpu_type, labelled, tried
from rollout.config.cloud import CloudSection
from rollout.config.settings import ComputeSection
from rollout.model.errors import ConfigError, UnavailableError

log = structlog.get_logger()

LEAD_S, BUDGET_S = 30.0, 15.0
MAINTENANCE_LEAD_S, MAINTENANCE_BUDGET_S = 60.0, 30.0
FOUND_LEAD_S = 15.0
"""Lead time of a preemption that had begun before the first query, at an unknown time."""
WAIT_S = 10
"""How long a hanging request may hide a notice: a third of its lead time."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 5.0
"""Pause between two tries to reach a server that does not respond."""
ABSENT_S = 30.0
FLAVOR = {"Metadata-Flavor": "Google"}
FAMILIES = {
    "a2-highgpu-": "nvidia-a100", "a2-megagpu-": "nvidia-a100", "a2-ultragpu-": "nvidia-a100-80gb",
    "a3-highgpu-": "nvidia-h100", "a3-megagpu-": "nvidia-h100", "a3-edgegpu-": "nvidia-h100",
    "a3-ultragpu-": "nvidia-h200", "a4-highgpu-": "nvidia-b200", "g2-standard-": "nvidia-l4",
}  # fmt: skip
"""https://cloud.google.com/compute/docs/gpus"""


def open_compute(section: ComputeSection, cloud: CloudSection) -> GceCompute:
    return GceCompute(local.open_compute(section, cloud), Metadata(gce_endpoint()))


class GceCompute:
    def __init__(
        self, here: LocalCompute, metadata: Metadata, *, wait_s: int = WAIT_S, pause_s: float = PAUSE_FIRST_S
    ) -> None:
        self._local = here
        self._metadata = metadata
        self._wait_s = wait_s
        self._pause_s = pause_s

    async def why_silent(self) -> str:
        """Return why the metadata server does not respond, or ""."""
        try:
            await self._get("instance/id")
        except UnavailableError as error:
            return error.message
        return ""

    async def inventory(self) -> Host:
        """Return the machine, with its location as labels. Raises ConfigError if the metadata server does not
        respond."""
        host = await self._local.inventory()
        try:
            zone, kind, preemptible, accelerator = await tried(self._facts)
        except UnavailableError as error:
            raise ConfigError(f'[compute] backend = "gce": {error.message}; "local" runs anywhere') from None
        labels = {
            "cloud": "gcp",
            "region": zone.rpartition("-")[0],
            "zone": zone,
            "instance_type": kind,
            "lifecycle": {"TRUE": "spot", "FALSE": "on-demand"}.get(preemptible, ""),
            "gpu_type": accelerator or gpu_type(kind, FAMILIES, host.gpus),
        }
        return labelled(host, labels)

    async def _facts(self) -> list[str]:
        return [
            ((await self._get(f"instance/{path}"))[0] or "").rpartition("/")[2]
            for path in ("zone", "machine-type", "scheduling/preemptible", "attributes/accelerator-type")
        ]

    async def preemption(self) -> Preemption:
        return await first(
            self._local.preemption(),
            self._watch("instance/preempted", _preempted),
            self._watch("instance/maintenance-event", _maintenance),
        )

    async def notice(self) -> Preemption | None:
        """Return the current notice. Raises UnavailableError if that is unknown."""
        for path, read in (("instance/preempted", _preempted), ("instance/maintenance-event", _maintenance)):
            value, _ = await self._get(path)
            if value is not None and (notice := read(value, None)) is not None:
                return notice
        return None

    async def _watch(self, path: str, read: Callable[[str, float | None], Preemption | None]) -> Preemption:
        """Query once, then wait for changes; query again after each failure."""
        known_at: float | None = None  # until when there was surely no notice
        etag, failing, pause_s = "", False, self._pause_s
        while True:
            asked_at = time.monotonic()
            try:
                value, etag = await self._get(path, etag)
            except UnavailableError as error:
                if not failing:
                    log.warning("metadata_unanswered", path=path, error=error.message)
                if etag:  # a change would have been told until the connection broke
                    known_at = asked_at if isinstance(error, SilentError) else time.monotonic()
                failing, etag = True, ""
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            failing, pause_s = False, self._pause_s
            if value is None:  # not told here, as by the metadata server of GKE
                await asyncio.sleep(ABSENT_S)
                continue
            now = time.monotonic()
            notice = read(value, now - known_at if known_at is not None else None)
            if notice is not None:
                return notice
            known_at = now
            if now - asked_at < 0.1:  # a server that does not wait is asked no faster than this
                await asyncio.sleep(self._pause_s if etag else PAUSE_MAX_S)

    async def _get(self, path: str, etag: str = "") -> tuple[str | None, str]:
        """Return the value (None if there is none) and its ETag. With `etag`, waits for a change, for a limited
        time."""
        query = f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={quote(etag)}" if etag else ""
        wait_s = ANSWER_S + (self._wait_s if etag else 0)
        answer = await self._metadata.ask("GET", f"/computeMetadata/v1/{path}{query}", FLAVOR, answer_s=wait_s)
        if answer.headers.get("Metadata-Flavor", "") != "Google":
            raise UnavailableError(f"what answers at {self._metadata.address} is not Google's metadata server")
        if answer.status == 404:
            return None, ""
        if answer.status != 200:
            raise UnavailableError(f"the metadata server answers HTTP {answer.status} for {path}")
        return answer.text.strip(), answer.headers.get("ETag", "")

    async def close(self) -> None:
        await self._metadata.close()
        await self._local.close()


def _preempted(value: str, late_s: float | None) -> Preemption | None:
    """Return the notice. `late_s` is how long ago there was none, None if nobody looked before."""
    if value.upper() != "TRUE":
        return None
    lead_s = FOUND_LEAD_S if late_s is None else max(0.0, LEAD_S - late_s)
    return Preemption("Compute Engine preempts this machine", lead_s, min(BUDGET_S, lead_s / 2))


def _maintenance(value: str, late_s: float | None) -> Preemption | None:
    if value.startswith("TERMINATE"):
        lead_s = max(0.0, MAINTENANCE_LEAD_S - (late_s or 0.0))
        reason = "Compute Engine ends this machine for maintenance of its host"
        return Preemption(reason, lead_s, min(MAINTENANCE_BUDGET_S, lead_s / 2))
    if value.startswith("MIGRATE"):
        log.info("maintenance_migrates")
    return None
