"""Lines of `rollout plan` about `[cloud]`: where objects live, which secrets are read, which queues exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollout.client.embedded_cloud import own_prefix
from rollout.config.cloud import CloudSection

_SECRETS = {"aws": "AWS Secrets Manager", "gcp": "Google Secret Manager"}


def objects_line(cloud: CloudSection, state: Path | None = None) -> str:
    """Return the place of objects as `s3://bucket/prefix/ (us-west-2)`, or an empty string if they do not live in a
    bucket.

    `state` is the state directory of a private cluster.
    """
    told = [part for part in (cloud.region or cloud.project, cloud.endpoint_of_objects) if part]
    place = cloud.place
    if place and state is not None:
        place = place.removesuffix(cloud.prefix) + own_prefix(state, cloud)
    return place + (f" ({', '.join(told)})" if told and place else "")


def secrets_line(cloud: CloudSection) -> str:
    names = cloud.secrets.allowlist
    return f"reads {len(names)} of {_SECRETS[cloud.provider]}: {', '.join(names)}" if names else ""


def workload_lines(cloud: CloudSection, *, private: Path | None, queued: bool) -> Iterator[str]:
    """Yield the lines of a workload's plan.

    `private` is the state directory of the command's own cluster, whose coordinator is given this section. `queued`
    says that the workload itself describes its queues.
    """
    if not cloud.provider:
        return
    if private is None:
        yield f"[cloud] {cloud.provider} is for URLs and queues: the cluster itself knows where objects live"
    elif cloud.place:
        yield f"objects live in {objects_line(cloud, private)}, which the coordinator reaches; workers ask it for them"
    if private is not None and (secrets := secrets_line(cloud)):
        yield f"secrets: a worker {secrets}"
    if not queued:
        yield from queue_lines(cloud)


def queue_lines(cloud: CloudSection) -> Iterator[str]:
    if cloud.intake:
        yield f"queue of rows: {cloud.intake} ({cloud.queue_backend}), with [input] queue = true"
    if cloud.outlet:
        yield f"queue of results: {cloud.outlet}"
