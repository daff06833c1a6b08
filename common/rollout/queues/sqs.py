"""Amazon SQS, standard and FIFO: ten messages per call, several concurrent calls; failures of a batch are retried
singly."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from typing import Any

import structlog

from rollout.cloud.aws import Aws
from rollout.cloud.aws_errors import code_of, rows
from rollout.cloud.aws_regions import unknown_region
from rollout.config.cloud import CloudSection
from rollout.config.cloud_rules import region_of_queue
from rollout.model.errors import ConfigError, InputError, NotFoundError, UnavailableError
from rollout.queues.batches import cut, each
from rollout.queues.cloud_queue import LOOK_BUDGET_S, OPEN_BUDGET_S, CloudQueue, Entry
from rollout.queues.port import Message, Outgoing, Place
from rollout.queues.receiver import Call
from rollout.queues.sqs_messages import Encoded, decode, encode, fifo_id
from rollout.queues.sqs_policy import OLD_MAX_BYTES, facts_of
from rollout.storage.port import Storage

log = structlog.get_logger()

BATCH = 10
LONGEST_POLL_S = 20
DEFAULT_GROUP = "rollout"
_LOST = frozenset({"MessageNotInflight", "ReceiptHandleIsInvalid", "InvalidParameterValue", "InvalidIdFormat"})
"""Error codes of a receipt that is no longer the current one."""
_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "403"})
_KEYS = {"input": "cloud.sqs.queue_url", "output": "cloud.sqs.output_queue_url"}


def open_queue(place: Place, cloud: CloudSection, storage: Storage | None) -> SqsQueue:
    """Return the queue with the URL `place.address`."""
    return SqsQueue(place, Aws(cloud))


class SqsQueue(CloudQueue):
    send_batch = receive_batch = BATCH
    most_calls = 16
    enough = 0.5

    def __init__(self, place: Place, aws: Aws, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(place, aws, now=now)
        self._aws = aws
        self._key = _KEYS[place.way]
        self._full_told = False

    async def open(self) -> None:
        url = self._address
        if not url:
            raise ConfigError(
                f"{self._key}: not set: it is the queue's URL, https://sqs.REGION.amazonaws.com/ACCOUNT/NAME"
            )
        there, here = region_of_queue(url), self._aws.region("sqs")
        if there and there != here:
            raise ConfigError(
                f"{self._key}: the queue is in {there}, but the region in use is {here}: set [cloud] region ="
                f' "{there}", or name a queue of {here}'
            )
        try:
            answer = await self._call("get_queue_attributes", "read", budget_s=OPEN_BUDGET_S, AttributeNames=["All"])
            self._facts = facts_of(url, answer.get("Attributes") or {})
        except ConfigError as e:
            if code_of(e.__cause__ or e) not in _DENIED:
                raise
            self._facts = facts_of(url, None)
        except UnavailableError as e:
            if unknown := None if self._aws.endpoint("sqs") else unknown_region("sqs", here, "cloud.region"):
                raise unknown from e
            raise

    def _entry(self, index: int, message: Outgoing) -> Entry:
        fifo, most = self.facts.ordered, self.facts.max_message_bytes
        encoded = encode(message, fifo=fifo, index=index)
        if encoded.size > most:
            raise InputError(
                f"a message of {encoded.size:,} bytes is too large: queue {self.facts.name} takes {most:,}",
                index=index,
            )
        return Entry(index, _outgoing(message, encoded, fifo=fifo), encoded.size)

    def _order(self, message: Outgoing) -> str | None:
        """Return the group; messages of a FIFO queue without one form one group."""
        return message.group if self.facts.ordered else None

    def _batch_bytes(self) -> int:
        return max(self.facts.max_message_bytes, OLD_MAX_BYTES)

    async def _send(self, batch: list[Entry]) -> dict[int, str]:
        answer = await self._batch("send_message_batch", "sent to", batch)
        ids = {int(done["Id"]): str(done["MessageId"]) for done in rows(answer, "Successful")}
        for entry in batch:  # in order: of a FIFO queue
            if entry.index not in ids:
                sent = await self._call("send_message", "sent to", **entry.fields)
                ids[entry.index] = str(sent["MessageId"])
        return ids

    async def _receive(self, call: Call) -> list[Message]:
        """Receive messages: one long poll while the queue is empty, up to 16 concurrent short polls while messages
        come."""
        poll_s = 0 if call.at_once or call.calls > 1 else min(LONGEST_POLL_S, math.ceil(call.wait_s))
        more: dict[str, Any] = {"ReceiveRequestAttemptId": uuid.uuid4().hex} if self.facts.ordered else {}
        try:
            answer = await self._call(
                "receive_message",
                "received from",
                LOOK_BUDGET_S if call.at_once else 60.0,
                MaxNumberOfMessages=call.size,
                VisibilityTimeout=self._whole(call.lease_s),
                WaitTimeSeconds=poll_s,
                MessageSystemAttributeNames=["ApproximateReceiveCount", "MessageGroupId"],
                MessageAttributeNames=["All"],
                **more,
            )
        except ConfigError as e:
            if code_of(e.__cause__ or e) not in ("OverLimit", "AWS.SimpleQueueService.OverLimit"):
                raise
            if not self._full_told:
                log.warning("queue_in_flight_limit", queue=self._address, limit=self.facts.max_in_flight)
                self._full_told = True
            await asyncio.sleep(min(1.0, poll_s))
            return []
        return [decode(raw) for raw in rows(answer, "Messages")]

    async def _change(self, messages: list[Message], lease_s: int, budget_s: float) -> list[Message]:
        return await self._settle("change_message_visibility", messages, budget_s, VisibilityTimeout=lease_s)

    async def _acknowledge(self, messages: list[Message]) -> list[Message]:
        return await self._settle("delete_message", messages, 60.0)

    async def _settle(self, operation: str, messages: list[Message], budget_s: float, **fields: Any) -> list[Message]:
        """Call `operation` for every message, in batches; return those whose receipt is no longer current."""
        what = "acknowledged on" if operation == "delete_message" else "extended or given back on"

        async def settle(batch: list[Entry]) -> list[int]:
            answer = await self._batch(f"{operation}_batch", what, batch, budget_s)
            done = {int(entry["Id"]) for entry in rows(answer, "Successful")}
            lost = [int(entry["Id"]) for entry in rows(answer, "Failed") if str(entry.get("Code", "")) in _LOST]
            for entry in [entry for entry in batch if entry.index not in done and entry.index not in lost]:
                try:
                    await self._call(operation, what, budget_s=budget_s, **entry.fields)
                except ConfigError as e:
                    if code_of(e.__cause__ or e) not in _LOST:
                        raise
                    lost.append(entry.index)
            return lost

        entries = [Entry(n, {"ReceiptHandle": m.receipt, **fields}) for n, m in enumerate(messages)]
        lost = await each(cut(entries, BATCH), settle)
        return [messages[index] for indices in lost for index in sorted(indices)]

    async def depth(self) -> int | None:
        self._check_open()
        if self.facts.remarks:
            return None
        answer = await self._call("get_queue_attributes", "read", AttributeNames=["ApproximateNumberOfMessages"])
        return int(answer["Attributes"]["ApproximateNumberOfMessages"])

    async def _batch(self, operation: str, what: str, batch: list[Entry], budget_s: float = 60.0) -> dict[str, Any]:
        entries = [{"Id": str(entry.index), **entry.fields} for entry in batch]
        return await self._call(operation, what, budget_s=budget_s, Entries=entries)

    async def _call(self, operation: str, what: str, budget_s: float = 60.0, **parameters: Any) -> dict[str, Any]:
        url = self._address
        try:
            return await self._aws.call(
                "sqs", operation, what=f"{url} cannot be {what}", budget_s=budget_s, QueueUrl=url, **parameters
            )
        except (InputError, NotFoundError) as e:
            # Nothing that a row could mend: it is the queue.
            raise ConfigError(f"{e.message}; look at {self._key}") from e.__cause__


def _outgoing(message: Outgoing, encoded: Encoded, *, fifo: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"MessageBody": encoded.body}
    if encoded.attributes:
        fields["MessageAttributes"] = {
            name: {"DataType": "String", "StringValue": value} for name, value in encoded.attributes.items()
        }
    if fifo:
        fields["MessageGroupId"] = fifo_id(message.group or DEFAULT_GROUP)
        # Made before the first call: one that is sent again after an outage is no second message.
        fields["MessageDeduplicationId"] = fifo_id(message.deduplication or uuid.uuid4().hex)
    return fields
