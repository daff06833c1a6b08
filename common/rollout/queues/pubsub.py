"""Google Cloud Pub/Sub: a subscription to take from, a topic to send to, by its calls of REST."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from rollout.cloud.gcp import Gcp
from rollout.cloud.gcp_errors import Access, Refused
from rollout.config.cloud import CloudSection, PubsubSection
from rollout.model.errors import (
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    RolloutError,
    StateError,
    StorageUnavailableError,
    UnavailableError,
)
from rollout.queues.batches import cut, each
from rollout.queues.port import Facts, Message, Outgoing, Place
from rollout.queues.pubsub_messages import (
    MAX_LEASE_S,
    MAX_MESSAGE_BYTES,
    MIN_LEASE_S,
    decode,
    encode,
    subscription_facts,
    topic_facts,
)
from rollout.queues.pubsub_settle import ANSWERS, settle
from rollout.queues.receiver import Call, Receiver, fresh
from rollout.storage.port import Storage

log = structlog.get_logger()

MAX_PULL = 250
"""1,000 is the most. A pull brings what is at hand, mostly less; several of a moderate size are faster than one."""
MAX_PULLS = 8
SILENT_S = 150.0
"""A pull of an empty subscription says nothing for some 90 s."""
ACK_BATCH = 1000
ACK_BYTES = 400_000
"""A request of acknowledgements is 512 KiB at most."""
PUBLISH_BATCH = 1000
OPEN_BUDGET_S = LOOK_BUDGET_S = 15.0
_LANES = 8
_SUBSCRIBER = "roles/pubsub.subscriber"


def open_queue(place: Place, cloud: CloudSection, storage: Storage | None) -> PubsubQueue:
    """`place.address`: a subscription (input) or topic (output), by its name or as projects/P/subscriptions/S."""
    return PubsubQueue(place, Gcp(cloud))


def _topic_key(address: str, section: PubsubSection) -> str:
    """The topic of results, or that to which `rollout cloud doctor` sends."""
    doctors = address == section.topic != section.output_topic
    return "cloud.pubsub.topic" if doctors else "cloud.pubsub.output_topic"


class PubsubQueue:
    """`gcp` is closed with it."""

    def __init__(self, place: Place, gcp: Gcp, *, now: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._gcp = gcp
        self._now = now
        self._input = place.way == "input"
        self._key = "cloud.pubsub.subscription" if self._input else _topic_key(place.address, gcp.cloud.pubsub)
        self._path = ""
        self._facts: Facts | None = None
        self._deadline_s = 0.0
        self._receiver = Receiver(self._pull, self.nack, batch=MAX_PULL, most_calls=MAX_PULLS, enough=0.0, now=now)
        self._closed = False

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            raise StateError("the queue is not open")
        return self._facts

    async def open(self) -> None:
        kind = "subscriptions" if self._input else "topics"
        name = self._place.address
        if not name:
            raise ConfigError(f"{self._key}: not set: it is the name of one, or projects/PROJECT/{kind}/NAME")
        if "/" in name and (name.count("/") != 3 or f"/{kind}/" not in name or not name.startswith("projects/")):
            raise ConfigError(f"{self._key}: {name!r} is not of the form projects/PROJECT/{kind}/NAME")
        self._path = name if "/" in name else f"projects/{await self._gcp.project()}/{kind}/{name}"
        access = Access(f"pubsub.{kind}.get", "roles/pubsub.viewer", self._key)
        told: Mapping[str, Any] | None
        try:
            _, told = await self._request("GET", "", "read", access, budget_s=OPEN_BUDGET_S)
        except ConfigError as e:
            if not isinstance(e.__cause__, Refused) or e.__cause__.status != 403:
                raise
            told = None
        short = name.rsplit("/", 1)[-1]
        if self._input:
            self._facts = subscription_facts(short, told, self._key)
            self._deadline_s = float((told or {}).get("ackDeadlineSeconds") or -1.0)
        else:
            self._facts = topic_facts(short, told is not None)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if left := await self._receiver.end():
                await self._modify(left, 0, 5.0)
        except RolloutError as e:
            log.warning("queue_not_given_back", queue=self._path, error=str(e))
        finally:
            await self._gcp.close()

    def fits(self, message: Outgoing) -> bool:
        try:
            encode(message)
        except InputError:
            return False
        return True

    async def enqueue(self, messages: list[Outgoing]) -> list[str]:
        """Those of a group are sent one batch after the other."""
        self._check_open()
        lanes: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for index, message in enumerate(messages):
            lane = zlib.crc32(message.group.encode()) % _LANES if message.group else -1
            lanes.setdefault(lane, []).append((index, encode(message, index)))
        ids: dict[int, str] = {}

        async def send(batches: list[list[tuple[int, dict[str, Any]]]]) -> None:
            for batch in batches:
                ids.update(zip([index for index, _ in batch], await self._publish([m for _, m in batch]), strict=True))

        cuts = {
            lane: cut(entries, PUBLISH_BATCH, lambda entry: len(json.dumps(entry[1])), MAX_MESSAGE_BYTES)
            for lane, entries in lanes.items()
        }
        ordered = [batches for lane, batches in cuts.items() if lane >= 0]
        await each(ordered + [[batch] for batch in cuts.get(-1, [])], send)
        return [ids[index] for index in range(len(messages))]

    async def _publish(self, messages: list[dict[str, Any]]) -> list[str]:
        access = Access("pubsub.topics.publish", "roles/pubsub.publisher", self._key)
        _, answer = await self._request("POST", ":publish", "sent to", access, {"messages": messages})
        return [str(name) for name in _list(answer, "messageIds")]

    async def dequeue(self, limit: int, lease_s: float, wait_s: float = 0.0) -> list[Message]:
        """Up to eight pulls at a time while messages come. A pull gives the subscription's own lease: one of another
        length costs a call more."""
        self._check_open()
        taken = await self._receiver.take(limit, lease_s, wait_s)
        return await fresh(self, self._receiver, taken, _whole(lease_s), self._now(), self._deadline_s)

    async def _pull(self, call: Call) -> list[Message]:
        access = Access("pubsub.subscriptions.consume", _SUBSCRIBER, self._key)
        asked = {"maxMessages": call.size}
        if call.at_once:
            asked["returnImmediately"] = True
            pulled = self._request("POST", ":pull", "received from", access, asked, budget_s=LOOK_BUDGET_S)
        else:
            expect = (200, 504)
            pulled = self._request("POST", ":pull", "received from", access, asked, expect=expect, silent_s=SILENT_S)
        _, answer = await pulled
        return [decode(received) for received in _list(answer, "receivedMessages")]

    async def extend(self, messages: list[Message], lease_s: float) -> list[Message]:
        """Without exactly-once delivery the service does not tell which leases were lost."""
        self._check_open()
        return await self._modify(messages, _whole(lease_s), max(2.0, min(60.0, lease_s / 4)))

    async def nack(self, messages: list[Message]) -> None:
        self._check_open()
        await self._modify(messages, 0, 60.0)

    async def ack(self, messages: list[Message]) -> list[Message]:
        self._check_open()
        return await self._settle(":acknowledge", messages, 60.0, {})

    async def _modify(self, messages: list[Message], deadline_s: int, budget_s: float) -> list[Message]:
        return await self._settle(":modifyAckDeadline", messages, budget_s, {"ackDeadlineSeconds": deadline_s})

    async def _settle(
        self, verb: str, messages: list[Message], budget_s: float, more: Mapping[str, Any]
    ) -> list[Message]:
        """Those that were not confirmed."""
        access = Access("pubsub.subscriptions.consume", _SUBSCRIBER, self._key)
        what = "acknowledged on" if verb == ":acknowledge" else "extended or given back on"
        expect = ANSWERS if self.facts.exactly_once else (200,)

        async def send(ids: list[str]) -> tuple[int, Mapping[str, Any]]:
            return await self._request(
                "POST", verb, what, access, {"ackIds": ids, **more}, budget_s=budget_s, expect=expect
            )

        async def one(ids: list[str]) -> set[str]:
            return await settle(send, ids, f"{self._path} cannot be {what}", budget_s)

        receipts = [message.receipt for message in messages]
        lost = set[str]().union(*await each(cut(receipts, ACK_BATCH, len, ACK_BYTES), one))
        return [message for message in messages if message.receipt in lost]

    async def depth(self) -> int | None:
        return None

    async def is_empty(self, lease_s: float) -> bool:
        self._check_open()
        return await self._receiver.look(lease_s)

    async def _request(
        self,
        method: str,
        verb: str,
        what: str,
        access: Access,
        json: Mapping[str, Any] | None = None,
        *,
        budget_s: float = 60.0,
        expect: tuple[int, ...] = (200,),
        silent_s: float = 60.0,
    ) -> tuple[int, Mapping[str, Any]]:
        try:
            answer = await self._gcp.request(
                method,
                f"{self._gcp.endpoint('pubsub')}/v1/{self._path}{verb}",
                what=f"{self._path} cannot be {what}",
                budget_s=budget_s,
                json=json,
                expect=expect,
                access=access,
                silent_s=silent_s,
            )
        except StorageUnavailableError as e:
            raise UnavailableError(e.message) from e
        except NotFoundError as e:
            text = f"{e.message}; look at {self._key} and [cloud] project, or make it"
            raise ConfigError(text, failure="missing") from e.__cause__
        except (InputError, ConflictError) as e:
            raise ConfigError(f"{e.message}; look at {self._key}") from e.__cause__
        try:
            return answer.status, answer.json()
        except ValueError:
            return answer.status, {}

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the queue is closed")


def _list(answer: Mapping[str, Any], key: str) -> list[Any]:
    """Absent where it is empty."""
    return answer.get(key) or []


def _whole(lease_s: float) -> int:
    """Pub/Sub takes no lease below ten seconds but in a pull's answer, and 600 at most."""
    return math.ceil(min(MAX_LEASE_S, max(MIN_LEASE_S, lease_s)))
