"""Samples of several turns between the policy and an environment.

All samples of a group that are not finished take their next turn together. Drawn tokens are kept as ids. Only the new
tokens of an environment's answer are added, which are not trained on, and the engine continues from there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, cast

from blake3 import blake3
from rollout.model.errors import InputError, InvalidResultError
from rollout.workloads.json_form import HALF_PAIR, canonical, field_in, is_unicode, object_in
from rollout.workloads.train.rollouts import Episode, Group, GroupResult, Play, Sample, Scoring
from rollout.workloads.train.templates import Template

from rollout_worker.backends.port import Choice
from rollout_worker.backends.tokens import TextCodec
from rollout_worker.executors.rollout_scoring import Code, CodeFault, score

_SEED_BYTES = 6  # as those of samples

Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Turn:
    """One turn. `limit` is the maximum number of tokens."""

    prompt: Sequence[int]
    seed: int
    limit: int


Draw = Callable[[list[Turn]], Awaitable[list[Choice]]]


@dataclass(slots=True)
class _Playing:
    """A sample. `texts` is what the policy said in each turn; `messages` includes the environment's. `cut` says that
    its last turn used all tokens there was room for."""

    sample: Sample
    texts: list[str] = field(default_factory=list[str])
    messages: Messages = field(default_factory=Messages)
    reward: float | None = None
    trail: str = ""
    cut: bool = False
    over: bool = False


@dataclass(slots=True)
class Game:
    """A group with an environment. `version` is that of the weights with which `draw` samples."""

    group: Group
    episode: Episode
    scoring: Scoring
    codec: TextCodec
    template: Template
    draw: Draw
    code: Code
    _prompt: list[int] = field(default_factory=list[int])
    _room: int = 0

    async def result(self, again: bool) -> GroupResult:
        """Return the samples with rewards, or why there are none. `again` is that of `GroupResult`."""
        found = GroupResult([], again=again)
        playing: list[_Playing] = []
        try:
            trail = await self._reset()
            playing = [_Playing(Sample([], [], "stop", seed, "", []), trail=trail) for seed in self.group.seeds]
            for turn in range(self.episode.max_turns):
                if going := [one for one in playing if not one.over]:
                    await self._turn(turn, going)
        except CodeFault as fault:
            found.fault = fault.fault
        for one in playing:
            sample = one.sample
            sample.finish_reason = "length" if one.cut else "stop"
            sample.text = self.codec.decode(self._prompt, sample.ids)
            sample.versions = [[self.group.weights.version, len(sample.ids)]]
        found.samples = [one.sample for one in playing]
        found.prompt = self._prompt if self._prompt != self.group.prompt else []
        if not found.fault:
            group = replace(self.group, scoring=self.scoring)
            await score(group, found, self.code, [one.messages for one in playing] if self._chat else None)
        if not found.fault:
            found.rewards.append([one.reward for one in playing])
        return found

    @property
    def _chat(self) -> bool:
        return isinstance(self.scoring.prompt, list)

    async def _reset(self) -> str:
        """Reset the environment, whose first message becomes part of the prompt, and return its trail."""
        opening = _Playing(Sample([], [], "stop", self.group.seeds[0], "", []))
        ((said, _),) = await self._answers([opening])
        self._prompt = self._asked(said) if said else list(self.group.prompt)
        room, tokens = self.episode.max_prompt, len(self._prompt)
        if said and room and tokens > room:
            text = f"with what reset says the prompt has {tokens:,} tokens, and max_length leaves {room:,} beside "
            raise CodeFault("prompt_too_long", text + "max_completion_length: raise it, or let reset say less")
        self._room = min(self.group.max_tokens, self.codec.max_model_len - len(self._prompt))
        if self._room < 1:
            text = f"with what reset says the prompt has {len(self._prompt):,} tokens, and the model holds "
            raise CodeFault("prompt_too_long", f"{text}{self.codec.max_model_len:,}: let it say less")
        return opening.trail

    def _asked(self, said: str) -> list[int]:
        if not self._chat:
            self.scoring = replace(self.scoring, prompt=self.scoring.prompt + said)
            return [*self.group.prompt, *self._ids(said)]
        messages: Messages = [*self.scoring.prompt]
        if messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + said}
        else:
            messages.append({"role": "user", "content": said})
        self.scoring = replace(self.scoring, prompt=messages)
        return self._ids(self._rendered(messages))

    async def _turn(self, turn: int, going: list[_Playing]) -> None:
        await self._draw(turn, going)
        full: list[_Playing] = []
        for one, (said, done) in zip(going, await self._answers(going), strict=True):
            one.over = one.over or done
            if one.over:
                continue
            new = self._answer_ids(one, said)
            if len(one.sample.ids) + len(new) < self._room:
                one.sample.ids += new
                one.sample.logprobs += [0.0] * len(new)
                one.sample.learnt += [0] * len(new)
            else:  # no room for the answer and a token more
                one.cut = one.over = True
                full.append(one)
        if full:
            await self._answers(full)  # which did not know that it was the last turn

    async def _draw(self, turn: int, going: list[_Playing]) -> None:
        turns = [
            Turn([*self._prompt, *one.sample.ids], seed_of(one.sample.seed, turn), self._room - len(one.sample.ids))
            for one in going
        ]
        for one, choice in zip(going, await self.draw(turns), strict=True):
            one.sample.ids += choice.ids
            one.sample.logprobs += choice.id_logprobs
            one.sample.learnt += [1] * len(choice.ids)
            one.texts.append(choice.text)
            one.messages.append({"role": "assistant", "content": choice.text})
            one.cut = choice.finish_reason != "stop"
            one.over = one.cut or turn + 1 == self.episode.max_turns

    # ---- the environment

    async def _answers(self, asked: list[_Playing]) -> list[tuple[Any, bool]]:
        """Return each environment's answer and whether it is done. Raises CodeFault if there is none."""
        row = Play(
            self.episode.target, self.scoring.prompt, self.scoring.columns, [one.texts for one in asked],
            [one.over for one in asked], self.group.seeds[0], [one.sample.seed for one in asked],
            [one.trail for one in asked],
        )  # fmt: skip
        found = await self.code.call(row)
        if not isinstance(found, list) or len(cast("list[Any]", found)) != len(asked):
            raise CodeFault("reward_invalid", f"the environments' answer is no list of {len(asked)}")
        answers: list[tuple[Any, bool]] = []
        try:
            for one, fields in zip(asked, cast("list[Any]", found), strict=True):
                answer = object_in(fields, "the environment's answer")
                reward = field_in(answer, "reward", float, int, NoneType)
                if not is_unicode(answer):
                    raise CodeFault("observation_invalid", f"the environment's answer: {HALF_PAIR}")
                one.trail = field_in(answer, "trail", str)
                one.reward = None if reward is None else float(reward)
                answers.append((field_in(answer, "observation", str, list, NoneType), field_in(answer, "done", bool)))
        except InvalidResultError as error:
            raise CodeFault("reward_invalid", error.message) from error
        return answers

    def _answer_ids(self, one: _Playing, said: str | Messages) -> list[int]:
        """Return the tokens of an answer, to be appended to the sample's. For messages they span from the end of the
        policy's text to the start of its next turn."""
        if not self._chat:
            return self._ids(cast(str, said))
        new: Messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        before: Messages = [*self.scoring.prompt, *one.messages[:-1]]
        tools = self.scoring.columns.get("tools")
        try:
            ids = self.template.appended(self.codec.tokenizer, before, new, tools, one.sample.ids)
        except InputError as error:
            raise CodeFault("observation_invalid", error.message) from error
        one.messages += new
        return ids

    def _rendered(self, messages: Messages) -> str:
        tools = self.scoring.columns.get("tools")
        try:
            return self.template.rendered(self.codec.tokenizer, messages, tools, generation_prompt=True)
        except InputError as error:
            raise CodeFault("observation_invalid", error.message) from error

    def _ids(self, text: str) -> list[int]:
        return self.codec.tokenizer.encode(text, add_special_tokens=False)


def seed_of(seed: int, turn: int) -> int:
    """Return the seed of a sample's turn, counted from 0."""
    return int.from_bytes(blake3(canonical([seed, turn])).digest()[:_SEED_BYTES], "big") if turn else seed
