"""The policy in training, as the agent of a trial queries it: `Place.ask`, and requests to `policy_address`.

Requests that extend one another are one *conversation*, whose token ids are kept as generated: of the agent's messages
only new tokens are added. Others, such as one for a title, are conversations of their own. The one with the most
generated tokens is the trial's sample.

The seed of an answer is a hash of the sample's seed, of the question, and of how often the same was asked before: it
does not depend on the order of an agent's concurrent requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from blake3 import blake3
from rollout.model.item import ItemSpec
from rollout.workloads.json_form import JsonObject, canonical
from rollout.workloads.train.rollouts import ROLLOUT, Answer, Ask, Sample, TrialPolicy

from rollout_worker.json_fields import table
from rollout_worker.tagged_children import Parent
from rollout_worker.trials.agents.cluster_engine import Generations
from rollout_worker.trials.port import Reply, TrialFault, UsageCount

CONTEXT = "agent_context_window_exceeded"
_ATTEMPTS = 5
_SEED_BYTES = 6  # JSON's numbers are exact below 2^53
_STOPS_MAX = 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "top_k": (-1, 0), "min_p": (0,), "logit_bias": ({},), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "logprobs": (False,), "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
}  # fmt: skip
"""Keys of requests that would change the distribution in training or ask for something unsupported, with the values
that change nothing, besides null."""


@dataclass(slots=True)
class Conversation:
    """`messages` include the policy's answers; `sample.ids` follow `sample.prompt`. `cut` means that no room is
    left."""

    sample: Sample
    messages: list[JsonObject] = field(default_factory=list[JsonObject])
    began: int = 0  # messages before the first answer
    turns: int = 0
    cut: bool = False

    @property
    def drawn(self) -> int:
        return sum(self.sample.learnt)

    def is_extended_by(self, messages: list[JsonObject]) -> bool:
        return len(messages) > len(self.messages) and all(map(_same, self.messages, messages))


class PolicyEngine:
    """The policy of one try at one trial. Tokens are counted in `usage`."""

    def __init__(self, item: bytes, attempt: int, context: Parent, policy: TrialPolicy) -> None:
        labels = tuple(policy.labels)
        spec = ItemSpec(
            executor=ROLLOUT, max_attempts=_ATTEMPTS, max_worker_lost=policy.max_worker_lost, require_labels=labels
        )
        self._generations = Generations(item, attempt, context, spec)
        self._policy = policy
        self._conversations: list[Conversation] = []
        self._asked = Counter[str]()
        self._one_at_a_time = asyncio.Lock()
        self.usage = UsageCount()
        self.broken: TrialFault | None = None
        """Why an answer could not be generated through no fault of the agent: the trial is then worthless."""

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        """Return an answer. `sampling` has keys of a request to an OpenAI-compatible service. Raises TrialFault:
        `api_bad_request`, `agent_context_window_exceeded`, or why it could not be generated."""
        given = _messages(messages)
        most, stop = self._limits(sampling)
        async with self._one_at_a_time:
            found = max(
                (one for one in reversed(self._conversations) if one.is_extended_by(given)),
                key=lambda one: len(one.messages), default=None,
            )  # fmt: skip
            return await self._answered(found, given, most, stop)

    async def _answered(
        self, found: Conversation | None, messages: list[JsonObject], most: int | None, stop: list[str]
    ) -> Reply:
        conversation = found or Conversation(Sample([], [], "stop", self._policy.seed, "", []))
        sample = conversation.sample
        if conversation.cut:
            raise TrialFault(CONTEXT, f"the sample has its {self._policy.max_tokens} tokens: no more are drawn")
        if conversation.turns >= self._policy.max_turns:
            raise TrialFault(CONTEXT, f"the conversation has had its {self._policy.max_turns} turns (max_turns)")
        messages = [*conversation.messages, *messages[len(conversation.messages) :]]  # the policy's own as it said them
        answer = await self._drawn(
            messages, [*sample.prompt, *sample.ids], len(sample.prompt), len(conversation.messages), most, stop
        )
        if answer.fault is not None:
            conversation.cut = conversation.cut or answer.cut
            raise TrialFault(*answer.fault)
        if found is None:
            sample.prompt, conversation.began = answer.prompt, len(messages)
            self._conversations.append(conversation)
        else:
            sample.ids += answer.prompt
            sample.logprobs += [0.0] * len(answer.prompt)
            sample.learnt += [0] * len(answer.prompt)
        sample.ids += answer.ids
        sample.logprobs += answer.logprobs
        sample.learnt += [1] * len(answer.ids)
        sample.versions = [[self._policy.weights.version, len(sample.ids)]]
        conversation.messages = [*messages, {"role": "assistant", "content": answer.text}]
        conversation.turns += 1
        conversation.cut = answer.cut
        read = len(sample.prompt) + len(sample.ids) - len(answer.ids)
        self.usage.input_tokens += read
        self.usage.output_tokens += len(answer.ids)
        return Reply(answer.text, answer.finish_reason, read, len(answer.ids))

    async def _drawn(
        self, messages: list[JsonObject], so_far: list[int], first: int, said: int, most: int | None, stop: list[str]
    ) -> Answer:
        asked = blake3(canonical([so_far, messages, most, stop])).hexdigest()
        repeated = self._asked[asked]
        self._asked[asked] += 1
        digest = blake3(canonical([self._policy.seed, asked, repeated]))
        seed, tag = int.from_bytes(digest.digest()[:_SEED_BYTES], "big"), digest.hexdigest()[:32]
        ask = Ask(self._policy, messages, seed, so_far, first, said, most, stop, tag)
        try:
            return await self._generations.result(tag, lambda place: ask.encode(), Answer.decode)
        except TrialFault as fault:
            self.broken = self.broken or fault
            raise

    def recorded(self) -> JsonObject | None:
        """Return the sample for the trial's record: `sample`, the `messages` after its beginning, `turns`, and in
        `others` the number of other conversations. Returns None if nothing was generated."""
        main = max(self._conversations, key=lambda one: one.drawn, default=None)
        if main is None:
            return None
        main.sample.finish_reason = "length" if main.cut else "stop"
        said = [one for one in main.messages[main.began :] if one["role"] == "assistant"]
        main.sample.text = "".join(one["content"] for one in said[:1]) if len(said) == 1 else ""
        return {
            "sample": {name: getattr(main.sample, name) for name in Sample.__dataclass_fields__},
            "messages": main.messages[main.began :], "turns": main.turns, "others": len(self._conversations) - 1,
        }  # fmt: skip

    # ---- requests

    def _limits(self, sampling: Mapping[str, Any]) -> tuple[int | None, list[str]]:
        """Return (maximum tokens, texts that end the answer). Raises TrialFault, naming an unsupported key."""
        policy = self._policy
        for key, value in sampling.items():
            if key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]:
                raise _refused(f"{key} = {value!r:.40}: the policy is trained with what it draws, so it is not changed")
        temperature = sampling.get("temperature")
        if temperature is not None and temperature not in (policy.named, policy.temperature):
            raise _refused(f"temperature = {temperature!r:.40}: the run's is {policy.named:g}: leave it out")
        limits = [sampling[key] for key in ("max_tokens", "max_completion_tokens") if sampling.get(key) is not None]
        if any(type(one) is not int or one < 1 for one in limits):
            raise _refused("max_tokens must be a number of at least 1")
        stop: Any = sampling.get("stop") or []
        stops = cast("list[Any]", [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [None])
        if len(stops) > _STOPS_MAX or not all(isinstance(one, str) and one for one in stops):
            raise _refused(f"stop must be a text, or a list of at most {_STOPS_MAX}")
        return min(limits, default=None), stops


def _refused(text: str) -> TrialFault:
    return TrialFault("api_bad_request", text)


def _messages(given: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Return messages as the template expects them: role and text. Raises TrialFault."""
    found = [_message(one) for one in given]
    if not found:
        raise _refused("messages must not be empty")
    return found


def _message(given: Any) -> JsonObject:
    message = cast("dict[str, Any]", given) if isinstance(given, Mapping) else {}
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        parts = [table(one) for one in cast("list[Any]", content)]
        texts = [one.get("text") for one in parts if one.get("type", "text") == "text"]
        content = "".join(map(str, texts)) if len(texts) == len(parts) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise _refused("messages: each needs a role and a content that is text")
    return {"role": role, "content": content}


def _same(one: JsonObject, other: JsonObject) -> bool:
    """Compare messages ignoring surrounding white space, which agents strip."""
    return one["role"] == other["role"] and one["content"].strip() == other["content"].strip()
