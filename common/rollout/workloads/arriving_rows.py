"""Rows that arrive while they are run: from a queue, or in files that are followed."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.sections import QueuedInput


@dataclass(frozen=True, slots=True)
class QueueInput:
    """Rows arrive from the queue of `cloud`, and results go to its output queue too, if it has one.

    `skip`: a message that is no row becomes an invalid one; else it ends the intake. `stop_when_empty_s`: the intake
    ends when nothing has come for so long; 0: only when it is told to.
    """

    cloud: CloudSection
    skip: bool
    stop_when_empty_s: float

    @property
    def key(self) -> str:
        """Of the configuration, that names the queue."""
        return _QUEUE_KEYS[self.cloud.provider][0]

    @property
    def output_key(self) -> str:
        return _QUEUE_KEYS[self.cloud.provider][1]

    def section(self) -> JsonObject:
        """`input` of the run's configuration."""
        return {"queue": self.cloud.intake}


_QUEUE_KEYS = {
    "aws": ("cloud.sqs.queue_url", "cloud.sqs.output_queue_url"),
    "gcp": ("cloud.pubsub.subscription", "cloud.pubsub.output_topic"),
}
_WHERE_FROM = {
    "aws": "cloud.sqs.queue_url: is missing, and input.queue = true takes rows from it: add it below [cloud.sqs], as "
    'queue_url = "https://sqs.REGION.amazonaws.com/ACCOUNT/NAME"',
    "gcp": "cloud.pubsub.subscription: is missing, and input.queue = true takes rows from it: add it below "
    '[cloud.pubsub], as subscription = "NAME"',
    "": 'input.queue: rows arrive from the queue of [cloud], and there is none. Add [cloud] with provider = "aws", and '
    '[cloud.sqs] with queue_url = "https://sqs..."; or provider = "gcp", and [cloud.pubsub] with subscription = "NAME"',
}


def queue_input(rows: QueuedInput, cloud: CloudSection) -> QueueInput:
    """Return the queue of the rows. Raises ConfigError if `cloud` has no queue for rows."""
    if not cloud.intake:
        raise ConfigError(_WHERE_FROM[cloud.provider])
    return QueueInput(cloud, rows.skips_bad_rows, rows.stop_when_empty_s)


def describe_queue(queue: QueueInput) -> list[str]:
    """Return lines of `rollout plan` about rows from a queue."""
    cloud = queue.cloud
    bad = "become lines of errors.jsonl" if queue.skip else "end the intake"
    lines = [f"takes rows from {cloud.intake}, {_until(queue.stop_when_empty_s)}; messages that are no row {bad}"]
    return [*lines, f"sends each result to {cloud.outlet} as well"] if cloud.outlet else lines


def describe_followed(section: QueuedInput) -> list[str]:
    """Return lines of `rollout plan` about rows that arrive in files."""
    return [f"goes on with rows that come, {_until(section.stop_when_empty_s)}"] if section.follow else []


def _until(empty_s: float) -> str:
    return f"until nothing has come for {empty_s:g} s" if empty_s else "until it is stopped (Ctrl-C)"


def queued_input(settings: BaseModel) -> QueuedInput | None:
    """[input] of a configuration whose rows may come while they are run; None: they cannot."""
    found = getattr(settings, "input", None)
    return found if isinstance(found, QueuedInput) else None
