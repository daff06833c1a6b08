"""Check of a region's name. The SDK's list is as old as the SDK, so it is consulted only after calls fail."""

from __future__ import annotations

from difflib import get_close_matches

from rollout.cloud.missing import need
from rollout.model.errors import ConfigError


def unknown_region(service: str, region: str, key: str) -> ConfigError | None:
    """Return an error if the SDK does not know the region for `service`, else None. `key` is the configuration key."""
    session = need("botocore.session", "aws", '[cloud] provider = "aws"').get_session()
    known: list[str] = []
    for partition in session.get_available_partitions():
        known += session.get_available_regions(service, partition_name=partition)
    if region in known:
        return None
    near = get_close_matches(region, known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return ConfigError(f'{key}: AWS does not answer, and there seems to be no region "{region}"{hint}')
