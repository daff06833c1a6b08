"""The policy as an agent asks it: conversations, what is recorded of them, and the address inside a sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout.model.item import Failure, NewItem, Outcome
from rollout.workloads.train.rollouts import Answer, Ask, TrialPolicy, Weights, decode_item
from rollout_worker.executors.port import Child
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.port import Sandbox, Spec
from rollout_worker.sandboxes.providers import open_provider
from rollout_worker.trials.agents.policy_address import PolicyAddress
from rollout_worker.trials.agents.policy_engine import PolicyEngine
from rollout_worker.trials.port import TrialFault

POLICY = TrialPolicy(Weights(3, "aa"), 7, 0.7, 0.7, 30, 20, 3, [], [("role", "draw")], 9)
ROOM = 30


class Family:
    """The children of one trial. An answer is a token of its prompt's length for each message, and a text."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.ids: list[bytes] = []
        self.failing: set[int] = set()

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        (item,) = items
        assert item.spec.executor == "rollout" and item.spec.require_labels == (("role", "draw"),) and not seal
        if first_ordinal == len(self.asks):
            ask = decode_item(item.payload)  # pyright: ignore[reportArgumentType]
            assert isinstance(ask, Ask)
            self.asks.append(ask)
            self.ids.append(item.id)
        assert self.ids[first_ordinal] == item.id

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        while True:
            if from_child in self.failing:
                yield Child(from_child, Outcome.FAILED, b"", Failure("engine_died", "gone", True))
            else:
                yield Child(from_child, Outcome.DONE, self.answer(self.asks[from_child]).encode(), None)
            from_child += 1

    def answer(self, ask: Ask) -> Answer:
        if len(ask.so_far) - ask.first >= ROOM:
            return Answer(ask.tag, cut=True, fault=("agent_context_window_exceeded", "full"))
        added, drawn = [1] * len(ask.messages), [ask.seed % 100, 2] * (ask.max_tokens or 1)
        cut = len(ask.so_far) + len(added) + len(drawn) - (ask.first or len(added)) >= ROOM
        said = f" said {len(ask.messages)}\n"
        return Answer(ask.tag, added, drawn, [-1.0] * len(drawn), said, "length" if cut else "stop", cut)


def engine(family: Family, attempt: int = 1) -> PolicyEngine:
    return PolicyEngine(b"t" * 32, attempt, family, POLICY)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ask_twice(first: str = "a") -> list[Any]:
    """What agents keep of an answer has no space around it."""
    return [user(first), said("said 1"), user("b")]


async def test_what_extends_a_conversation_keeps_its_ids() -> None:
    family = Family()
    policy = engine(family)
    await policy.ask([user("a")])
    await policy.ask([user("a title, please")])
    await policy.ask(ask_twice())
    one, _, three = family.asks
    first = [1, one.seed % 100, 2]
    assert (three.so_far, three.first, three.said) == (first, 1, 2)
    found = policy.recorded()
    assert found is not None
    assert (found["turns"], found["others"], found["messages"]) == (
        2,
        1,
        [said(" said 1\n"), user("b"), said(" said 3\n")],
    )
    sample = found["sample"]
    assert sample["prompt"] == [1] and sample["ids"] == [*first[1:], 1, 1, 1, three.seed % 100, 2]
    assert sample["learnt"] == [1, 1, 0, 0, 0, 1, 1] and sample["logprobs"] == [-1, -1, 0, 0, 0, -1, -1]
    assert (sample["finish_reason"], sample["versions"], sample["seed"]) == ("stop", [[3, 7]], 7)
    assert (policy.usage.input_tokens, policy.usage.output_tokens) == (1 + 1 + 6, 6)


async def test_a_trial_that_is_tried_again_finds_what_was_drawn() -> None:
    family = Family()
    first = engine(family)
    await first.ask([user("a")])
    await first.ask([user("a")])
    family.failing.add(2)
    with pytest.raises(TrialFault, match="gone"):
        await first.ask(ask_twice())
    assert family.asks[0].seed != family.asks[1].seed, "the same question again has another answer"
    second = engine(family, attempt=2)
    for messages in ([user("a")], [user("a")], ask_twice()):
        await second.ask(messages)
    assert len(family.asks) == 4 and family.asks[3].seed == family.asks[2].seed


async def test_a_conversation_ends_where_there_is_no_room() -> None:
    policy = engine(Family())
    await policy.ask([user("a")], max_tokens=14)
    assert (await policy.ask(ask_twice(), max_completion_tokens=14, max_tokens=20)).finish_reason == "length"
    with pytest.raises(TrialFault) as caught:
        await policy.ask([*ask_twice(), said("said 3"), user("c")])
    assert caught.value.type == "agent_context_window_exceeded"
    found = policy.recorded()
    assert found is not None and found["sample"]["finish_reason"] == "length" and found["turns"] == 2
    turns = engine(Family())
    messages: list[Any] = []
    for number in (1, 3, 5):
        messages += [user("a")]
        await turns.ask(messages)
        messages += [said(f"said {number}")]
    with pytest.raises(TrialFault, match="max_turns"):
        await turns.ask([*messages, user("a")])


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"temperature": 0.2}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"n": 2}, "n = 2"),
        ({"tools": [{}]}, "tools"), ({"stop": [""]}, "stop"), ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)  # fmt: skip
async def test_a_request_that_would_bias_the_ratio_is_refused(request_: dict[str, Any], named: str) -> None:
    fine: dict[str, Any] = {"messages": [user("a")], "temperature": 0.7, "top_p": 1, "tools": None, "seed": 4}
    with pytest.raises(TrialFault) as caught:
        await engine(Family()).ask(**{**fine, **request_})
    assert caught.value.type == "api_bad_request" and named in caught.value.message
    await engine(Family()).ask(**fine)


CLIENT = """
import json, os, sys, urllib.error, urllib.request
def ask(body, key=os.environ["OPENAI_API_KEY"], path="/chat/completions"):
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, {"Authorization": "Bearer " + key})
    try:
        return 200, urllib.request.urlopen(request).read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
json.dump([ask(body), ask({**body, "stream": True}), ask(None, path="/models"), ask(body, key="no"), ask(b"{"),
           ask({**body, "n": 3}), ask({**body, "max_tokens": 15}), ask({"messages": messages + [
           {"role": "assistant", "content": "said 1"}, {"role": "user", "content": "b"}], "max_tokens": 15}),
           ask(body, path="/other")], sys.stdout)
"""


@pytest.mark.parametrize("provider", ["process", "bubblewrap"])
async def test_commands_of_a_sandbox_ask_at_an_address(tmp_path: Path, provider: str) -> None:
    async with open_provider(provider, tmp_path / "state", {}, key="type") as opened:
        try:
            sandbox = await opened.create(Spec())
        except SandboxRefusedError as error:
            pytest.skip(error.message)
        address = PolicyAddress(engine(Family()))
        await address.open(sandbox)
        try:
            done = await sandbox.exec(["/usr/bin/env", "python3", "-c", CLIENT], env=address.env, timeout_s=60)
        finally:
            await address.close()
    said_ = json.loads(done.check().stdout.text())
    whole = json.loads(said_[0][1])
    assert (
        whole["choices"][0]["message"] == {"role": "assistant", "content": " said 1\n"} and whole["model"] == "policy"
    )
    assert whole["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    *chunks, end, rest = said_[1][1].split("\n\n")
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert [one["delta"].get("content") for one in deltas] == [" said 1\n", None] and (end, rest) == (
        "data: [DONE]",
        "",
    )
    assert [one["finish_reason"] for one in deltas] == [None, "stop"]
    assert json.loads(said_[2][1])["data"][0]["id"] == "policy"
    assert [status for status, _ in said_] == [200, 200, 200, 401, 400, 400, 200, 400, 404]
    assert json.loads(said_[7][1])["error"]["code"] == "context_length_exceeded"
    assert "n = 3" in json.loads(said_[5][1])["error"]["message"]


async def test_a_provider_that_gives_no_address_says_so() -> None:
    class Other(Sandbox):
        name = "other"

    Other.__abstractmethods__ = frozenset()
    with pytest.raises(SandboxRefusedError, match="bubblewrap or process"):
        await PolicyAddress(engine(Family())).open(object.__new__(Other))
