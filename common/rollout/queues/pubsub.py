"""Google Cloud Pub/Sub through its REST interface: receives from a subscription, sends to a topic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollout.cloud.gcp import Gcp
from rollout.cloud.gcp_errors import Access, Refused
from rollout.config.cloud import CloudSection, PubsubSection
from rollout.model.errors import (
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    StorageUnavailableError,
    UnavailableError,
)
from rollout.queues.batches import cut, each
from rollout.queues.cloud_queue import LOOK_BUDGET_S, OPEN_BUDGET_S, CloudQueue, Entry
from rollout.queues.port import Message, Outgoing, Place
from rollout.queues.pubsub_messages import decode, encode, subscription_facts, topic_facts
from rollout.queues.pubsub_settle import ANSWERS, settle
from rollout.queues.receiver import Call
from rollout.storage.port import Storage

SILENT_S = 150.0
"""Seconds without an answer before a call fails; the pull of an empty subscription takes some 90 s."""
ACK_BATCH = 1000
ACK_BYTES = 400_000
"""Maximum bytes of acknowledgements per request, whose limit is 512 KiB."""
_SUBSCRIBER = "roles/pubsub.subscriber"


def open_queue(place: Place, cloud: CloudSection, storage: Storage | None) -> PubsubQueue:
    """Return the queue of a subscription (input) or topic (output), given by name or as projects/P/subscriptions/S."""
    return PubsubQueue(place, Gcp(cloud))


def _topic_key(address: str, section: PubsubSection) -> str:
    """Return the configuration key of the topic of results, or of the one that `rollout cloud doctor` sends to."""
    doctors = address == section.topic != section.output_topic
    return "cloud.pubsub.topic" if doctors else "cloud.pubsub.output_topic"


class PubsubQueue(CloudQueue):
    send_batch = 1000
    receive_batch = 250
    """Messages per pull (maximum 1,000). A pull mostly returns fewer; several moderate pulls are faster than one."""
    most_calls = 8
    enough = 0.0

    def __init__(self, place: Place, gcp: Gcp, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(place, gcp, now=now)
        self._gcp = gcp
        self._input = place.way == "input"
        self._key = "cloud.pubsub.subscription" if self._input else _topic_key(place.address, gcp.cloud.pubsub)

    async def open(self) -> None:
        kind = "subscriptions" if self._input else "topics"
        name = self._address
        if not name:
            raise ConfigError(f"{self._key}: not set: it is the name of one, or projects/PROJECT/{kind}/NAME")
        if "/" in name and (name.count("/") != 3 or f"/{kind}/" not in name or not name.startswith("projects/")):
            raise ConfigError(f"{self._key}: {name!r} is not of the form projects/PROJECT/{kind}/NAME")
        self._address = name if "/" in name else f"projects/{await self._gcp.project()}/{kind}/{name}"
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
            self._own_lease_s = float((told or {}).get("ackDeadlineSeconds") or -1.0)
        else:
            self._facts = topic_facts(short, told is not None)

    def _entry(self, index: int, message: Outgoing) -> Entry:
        sent = encode(message, index)
        return Entry(index, sent, len(json.dumps(sent)))

    def _order(self, message: Outgoing) -> str | None:
        return message.group or None

    async def _send(self, batch: list[Entry]) -> dict[int, str]:
        access = Access("pubsub.topics.publish", "roles/pubsub.publisher", self._key)
        messages = [entry.fields for entry in batch]
        _, answer = await self._request("POST", ":publish", "sent to", access, {"messages": messages})
        return dict(zip([entry.index for entry in batch], map(str, _list(answer, "messageIds")), strict=True))

    async def _receive(self, call: Call) -> list[Message]:
        """Pull messages. A pull applies the subscription's own lease; another length costs a further call."""
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

    async def _acknowledge(self, messages: list[Message]) -> list[Message]:
        return await self._settle(":acknowledge", messages, 60.0, {})

    async def _change(self, messages: list[Message], lease_s: int, budget_s: float) -> list[Message]:
        """Change leases. Without exactly-once delivery the service does not tell which were lost."""
        return await self._settle(":modifyAckDeadline", messages, budget_s, {"ackDeadlineSeconds": lease_s})

    async def _settle(
        self, verb: str, messages: list[Message], budget_s: float, more: Mapping[str, Any]
    ) -> list[Message]:
        """Call `verb` for the messages and return those that were not confirmed."""
        access = Access("pubsub.subscriptions.consume", _SUBSCRIBER, self._key)
        what = "acknowledged on" if verb == ":acknowledge" else "extended or given back on"
        expect = ANSWERS if self.facts.exactly_once else (200,)

        async def send(ids: list[str]) -> tuple[int, Mapping[str, Any]]:
            return await self._request(
                "POST", verb, what, access, {"ackIds": ids, **more}, budget_s=budget_s, expect=expect
            )

        async def one(ids: list[str]) -> set[str]:
            return await settle(send, ids, f"{self._address} cannot be {what}", budget_s)

        receipts = [message.receipt for message in messages]
        lost = set[str]().union(*await each(cut(receipts, ACK_BATCH, len, ACK_BYTES), one))
        return [message for message in messages if message.receipt in lost]

    async def depth(self) -> int | None:
        return None

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
                f"{self._gcp.endpoint('pubsub')}/v1/{self._address}{verb}",
                what=f"{self._address} cannot be {what}",
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


def _list(answer: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list that the answer omits if it is empty."""
    return answer.get(key) or []
