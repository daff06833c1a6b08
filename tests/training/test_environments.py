"""Environments of several turns: what they may do, what becomes tokens of a sample, and what nobody learns."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rollout.model.item import DEFAULT_SPEC, Failure, Key, NewItem, Outcome
from rollout.workloads.json_form import canonical, parse_json
from rollout.workloads.map.failure import to_text
from rollout.workloads.train.config import SECTIONS
from rollout.workloads.train.policy_config import GrpoSection
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.rollouts import Episode, Group, GroupResult, Play, Scoring
from rollout_worker import rewards, scoring
from rollout_worker.algorithms.registered import make_policy_algorithm
from rollout_worker.backends.training.policy_trainer import PolicyTrainer, Row
from rollout_worker.backends.training.trainer import Job
from rollout_worker.backends.training.versions import Versions
from rollout_worker.executors.port import Attempt, Child, Context, Run
from rollout_worker.executors.rollout import NOTHING, RolloutExecutor
from rollout_worker.rewards import RewardError
from training_jobs import forget_accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.engine

CODE = '''
import random
from types import SimpleNamespace
from rollout_worker.environments import openenv, reasoning_gym, verifiers

class Count:
    """Done after `turns` turns; each is rewarded with its number."""
    closed = 0
    def reset(self, prompt, turns, **columns):
        self.turns, self.said, self.drawn = turns, [], random.random()
    def step(self, completion):
        self.said.append(completion)
        return f" wrong {len(self.said)} ", float(len(self.said)), len(self.said) == self.turns
    def close(self):
        Count.closed += 1

class Total(Count):
    def step(self, completion):
        found = super().step(completion)
        return SimpleNamespace(observation=found[0], done=found[2])
    async def reward(self):
        return 10.0 * len(self.said)

class Hint(Count):
    def reset(self, **columns):
        super().reset(**columns)
        return " hint"

class Tool(Count):
    def step(self, completion):
        observation, reward, done = super().step(completion)
        return [{"role": "tool", "content": "7"}, {"role": "user", "content": "go on"}], reward, done

class Dice(Count):
    def reset(self, prompt, turns, deck=(), **columns):
        self.first = random.random()
        deck.append(1)
        self.cards = len(deck)
    def step(self, completion):
        return f"{self.first} {random.random()} {self.cards}", None, False

class Moody(Count):
    calls = 0
    def step(self, completion):
        Moody.calls += 1
        return "", 0.0, Moody.calls == 7  # the first turn of the second sample, as it is played again

class Fickle(Count):
    calls = 0
    def step(self, completion):
        Fickle.calls += 1
        return f"{Fickle.calls}", 0.0, False
class Half(Count):
    def step(self, completion): return "a\\ud800", None, False
class Long(Count):
    def reset(self, **columns): return "word " * 5000

class ResetRaises(Count):
    def reset(self, **columns): raise KeyError("table")
class StepRaises(Count):
    def step(self, completion): return self.nothing
class Pair(Count):
    def step(self, completion): return "a", 1.0
class Silent(Count):
    def step(self, completion): return None, 1.0, False
class Swapped(Count):
    def step(self, completion): return "a", True, 0.5
class NotANumber(Count):
    def step(self, completion): return "a", float("nan"), False
class Messages(Count):
    def step(self, completion): return [{"role": "user", "content": "a"}], None, False
class Listing(Count):
    def reset(self, **columns): return ["a"]
class Needs:
    def __init__(self, level): pass
NUMBER = 3

class Client:
    def reset(self, seed=0):
        self.sum = seed
        return SimpleNamespace(observation=self.sum)
    async def step(self, action):
        self.sum += action
        return SimpleNamespace(observation=self.sum, reward=float(self.sum), done=self.sum > 5)
    def close(self): pass
Open = openenv(Client, lambda text: int(text), lambda seen: f"sum {seen}")
Gym = reasoning_gym(SimpleNamespace(score_answer=lambda answer, entry: float(answer == entry["answer"])))

class Vf:
    """The protocol of verifiers' MultiTurnEnv."""
    async def init_state(self, row, client, model, sampling):
        return {"prompt": row["prompt"], "answer": row["answer"], "trajectory": []}
    async def setup_state(self, state): return state
    async def is_completed(self, state): return len(state["trajectory"]) == 2
    async def get_prompt_messages(self, state):
        last = state["trajectory"][-1]
        return [*last["prompt"], *last["completion"], {"role": "user", "content": "again"}]
    async def render_completion(self, state):
        last = state["trajectory"][-1]
        state["completion"] = [*last["prompt"], *last["completion"]][len(state["prompt"]):]
    class rubric:
        async def score_rollout(state, score_sem):
            state["reward"] = float(state["completion"][-1]["content"] == state["answer"]) + len(state["completion"])
Vf.rubric.score_rollout = staticmethod(Vf.rubric.score_rollout)
Ver = verifiers(Vf)

def digits(prompts, completions, **columns):
    return [float(len(one)) for one in completions]
'''
CHAT = [{"role": "user", "content": "count"}]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "games.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rewards, "_loaded", {})
    yield
    sys.modules.pop("games", None)


async def answered(row: dict[str, Any]) -> Any:
    found = scoring.answer(row)
    return await found if isinstance(found, Awaitable) else found


async def play(name: str, *histories: list[str], prompt: Any = "p", over: bool = False, **columns: Any) -> Any:
    seeds = list(range(1, len(histories) + 1))
    given = {"turns": 3, **columns}
    row = Play(
        f"games:{name}", prompt, given, list(histories), [over] * len(histories), 7, seeds, [""] * len(seeds), "t"
    )
    found = await answered(parse_json(row.encode()))
    assert found["tag"] == "t" and parse_json(canonical(found))
    return [(one["observation"], one["reward"], one["done"]) for one in found["value"]]


# ---- a play


async def test_a_play_is_a_function_of_what_was_said() -> None:
    assert await play("Count", [], ["a"], ["a", "b", "c"]) == [
        (None, None, False), (" wrong 1 ", 1.0, False), (" wrong 3 ", 6.0, True)
    ]  # fmt: skip
    assert sys.modules["games"].Count.closed == 3
    assert await play("Total", ["a"], ["a", "b", "c"]) == [(" wrong 1 ", None, False), (" wrong 3 ", 30.0, True)]
    assert await play("Total", ["a"], over=True) == [(" wrong 1 ", 10.0, False)]
    first = await play("Dice", ["a"], ["a"], deck=[])
    assert first == await play("Dice", ["b"], ["b"], deck=[])
    (one, two) = (found[0].split() for found in first)
    assert one[0] == two[0] and one[1] != two[1] and one[2] == two[2] == "1"


async def test_what_others_call_environments() -> None:
    assert await play("Open", [], ["1"], ["1", "4"], seed=2) == [
        ("sum 2", None, False), ("sum 3", 3.0, False), ("sum 7", 10.0, True)
    ]  # fmt: skip
    assert await play("Gym", [" 4 "], ["5"], answer="4") == [("", 1.0, True), ("", 0.0, True)]
    again = [{"role": "user", "content": "again"}]
    assert await play("Ver", ["a"], ["a", "x"], prompt=CHAT, answer="x") == [(again, None, False), (None, 4.0, True)]


@pytest.mark.parametrize(
    ("name", "history", "message"),
    [
        ("ResetRaises", [], "environment games:ResetRaises: reset raised KeyError: games.py:"),
        ("StepRaises", ["a", "b"], "step raised AttributeError: games.py:"),
        ("Count", ["a", "b", "c", "d"], "it is done sooner"),
        ("Pair", ["a"], "step returned tuple ('a', 1.0), and not (observation, reward, done) (sample 1, turn 1)"),
        ("Silent", ["a"], "no observation"),
        ("Swapped", ["a"], "float 0.5 as done"),
        ("NotANumber", ["a"], "the reward of step: nan is no reward"),
        ("Messages", ["a"], "and not text, as the prompt is"),
        ("Listing", [], "reset returned list ['a']"),
        ("Needs", [], "missing 1 required positional argument: 'level'"),
        ("NUMBER", [], "is int 3, and neither a class nor a function"),
        ("Nowhere", [], "environment games:Nowhere cannot be loaded"),
    ],
)
async def test_what_an_environment_does_wrong_is_said(name: str, history: list[str], message: str) -> None:
    with pytest.raises(RewardError) as error:
        await play(name, history)
    assert message in str(error.value)


# ---- groups


@dataclass
class Ledger:
    """A context whose children are answered in this process. `kept`: those that are there from an earlier attempt."""

    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    kept: dict[int, Child] = field(default_factory=dict[int, Child])

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        assert not seal
        for ordinal, item in enumerate(items, first_ordinal):
            if ordinal in self.kept:
                continue
            row = parse_json(cast(bytes, item.payload))
            self.calls.append(row)
            try:
                child = Child(ordinal, Outcome.DONE, canonical(await answered(row)), None)
            except RewardError as error:
                failure = Failure("exception", to_text("rewards.RewardError", str(error), ""), False)
                child = Child(ordinal, Outcome.FAILED, b"", failure)
            self.kept[ordinal] = child

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        while True:
            yield self.kept[from_child]
            from_child += 1


@asynccontextmanager
async def started(model: Path) -> AsyncIterator[Any]:
    """An engine; called with a group it gives the result."""
    backend = {"kind": "transformers", "dtype": "float32", "device": "cpu"}
    config = {"model": {"uri": str(model)}, "backend": backend, "groups_at_once": 3, "chat_template": None}
    run = Run("01J00000000000000000000000", "train", config, executor="rollout")
    executor = RolloutExecutor()
    await executor.start(run, cast(Context, Ledger()))

    async def draw(group: Group, ledger: Ledger | None = None, attempt: int = 1) -> GroupResult:
        given = Attempt(
            Key(1, 0), attempt, b"i" * 32, group.encode(), DEFAULT_SPEC, run, failures=attempt - 1
        )  # fmt: skip
        done = await executor.run(given, cast(Context, ledger or Ledger()))
        return GroupResult.decode(done.data, 1 + len(group.scoring.functions) if group.scoring else 0)

    try:
        yield draw
    finally:
        await executor.close()


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def group_of(
    tokenizer: Any, name: str, *, turns: int = 3, max_turns: int = 5, chat: bool = False, **more: Any
) -> Group:
    """Every other token ends a turn, so that turns are short."""
    prompt: Any = CHAT if chat else "count"
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) if chat else prompt
    return Group(
        step=0, index=0, prompt=tokenizer.encode(text, add_special_tokens=False), seeds=[1, 2, 3, 4],
        max_tokens=more.pop("max_tokens", 200), weights=NOTHING, stop=list(range(4, 512, 2)),
        scoring=Scoring(more.pop("functions", []), prompt, columns={"turns": turns}),
        environment=Episode(f"games:{name}", max_turns),
    )  # fmt: skip


def turns_of(learnt: list[int], ids: list[int]) -> list[tuple[int, list[int]]]:
    """(learnt, ids) of each stretch."""
    found: list[tuple[int, list[int]]] = []
    for mark, one in zip(learnt, ids, strict=True):
        if not found or found[-1][0] != mark:
            found.append((mark, []))
        found[-1][1].append(one)
    return found


async def test_what_reset_adds_counts_against_max_length(tiny: Path, tokenizer: Any) -> None:
    group = group_of(tokenizer, "Hint")
    async with started(tiny) as draw:
        for room, code in ((len(group.prompt), "prompt_too_long"), (len(group.prompt) + 8, None)):
            result = await draw(replace(group, environment=Episode("games:Hint", 1, room)))
            assert result.fault.get("code") == code and bool(result.samples) == (code is None)


@pytest.mark.parametrize(
    ("name", "chat", "answers"),
    [
        ("Count", False, [" wrong 1 ", " wrong 2 "]),
        ("Hint", False, [" wrong 1 ", " wrong 2 "]),
        (
            "Hint",
            True,
            [f"<|im_end|>\n<|im_start|>user\n wrong {n} <|im_end|>\n<|im_start|>assistant\n" for n in (1, 2)],
        ),
        (
            "Tool",
            True,
            ["<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"]
            * 2,
        ),
    ],
)
async def test_ids_are_those_that_the_engine_saw(
    tiny: Path, tokenizer: Any, name: str, chat: bool, answers: list[str]
) -> None:
    """Each token's log-probability is the model's own behind all tokens before it, answers as they were made."""
    group = group_of(tokenizer, name, chat=chat, functions=["games:digits"])
    ledger = Ledger()
    async with started(tiny) as draw:
        result = await draw(group, ledger)
    assert not result.fault and result.rewards[1] == [6.0] * 4
    prompt = result.prompt or group.prompt
    assert tokenizer.decode(prompt).count(" hint") == (name == "Hint") and bool(result.prompt) == (name == "Hint")
    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(tiny, dtype=torch.float32)
    for place, sample in enumerate(result.samples):
        assert (sample.finish_reason, sample.versions) == ("stop", [[-1, len(sample.ids)]])
        stretches = turns_of(sample.learnt, sample.ids)
        assert [mark for mark, _ in stretches] == [1, 0, 1, 0, 1]
        for (_, said), (_, new), answer in zip(stretches[::2], stretches[1::2], answers, strict=False):
            expected = tokenizer.encode(answer, add_special_tokens=False)
            assert new == (expected[1:] if expected[0] == said[-1] else expected)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.ids])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1)[range(len(sample.ids)), sample.ids]
        expected = torch.where(torch.tensor(sample.learnt) > 0, own, 0.0)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=1e-4)
        last = ledger.calls[-1]
        turns = [answer for answer in last["completions"][place] if answer["role"] == "assistant"] if chat else []
        assert result.rewards[0][place] == (len(last["completions"][place]) if chat else len(sample.text))
        assert len(turns) == (3 if chat else 0)
    assert [len(call.get("histories", [])) for call in ledger.calls] == [1, 4, 4, 4, 0]


async def test_bytes_are_a_function_of_the_group(tiny: Path, tokenizer: Any) -> None:
    group, other = group_of(tokenizer, "Count"), group_of(tokenizer, "Dice", max_turns=2)
    async with started(tiny) as draw:
        alone = await draw(group)
        assert len({tuple(sample.ids) for sample in alone.samples}) == 4
        found = await _gathered(draw(other), draw(group), draw(group))
        assert found[1:] == [alone, alone]
        moved = await draw(replace(group, seeds=[1, 2, 3, 99]))
        assert moved.samples[3].ids != alone.samples[3].ids


async def _gathered(*given: Awaitable[GroupResult]) -> list[GroupResult]:
    import asyncio

    return list(await asyncio.gather(*given))


async def test_what_ends_a_sample(tiny: Path, tokenizer: Any) -> None:
    async with started(tiny) as draw:
        endless = await draw(group_of(tokenizer, "Total", turns=100, max_turns=2))
        assert endless.rewards == [[20.0] * 4] and {one.finish_reason for one in endless.samples} == {"stop"}
        short = await draw(group_of(tokenizer, "Total", turns=100, max_turns=100, max_tokens=20))
        assert {one.finish_reason for one in short.samples} == {"length"}
        for sample, reward in zip(short.samples, short.rewards[0], strict=True):
            stretches = turns_of(sample.learnt, sample.ids)
            assert len(sample.ids) <= 20 and sample.learnt[-1] == 1, "an answer that nobody answers is left out"
            assert reward == 10.0 * sum(mark for mark, _ in stretches), "the reward at the end is asked for then too"
        near = replace(group_of(tokenizer, "Total", turns=100, max_turns=100), prompt=[70] * 2028)
        full = await draw(near)
        assert {one.finish_reason for one in full.samples} == {"length"}
        assert max(len(one.ids) for one in full.samples) == 20, "the model's context is full"


@pytest.mark.parametrize(
    ("name", "samples", "code"),
    [
        ("ResetRaises", 0, "exception"),
        ("StepRaises", 4, "exception"),
        ("Moody", 4, "exception"),
        ("Fickle", 4, "exception"),
        ("Half", 4, "observation_invalid"),
        ("Long", 0, "prompt_too_long"),
    ],
)
async def test_a_fault_is_the_groups(tiny: Path, tokenizer: Any, name: str, samples: int, code: str) -> None:
    async with started(tiny) as draw:
        result = await draw(group_of(tokenizer, name, functions=["games:digits"]))
    assert result.fault["code"] == code
    assert code != "exception" or f"environment games:{name}" in result.fault["message"]
    assert len(result.samples) == samples and result.rewards == []


async def test_another_try_finds_its_own_answers(tiny: Path, tokenizer: Any) -> None:
    """And not those of the try before it, whose samples were others; a failure among them is not taken for its own."""
    group = group_of(tokenizer, "Count", functions=["games:digits"])
    async with started(tiny) as draw:
        expected = await draw(group)
        ledger = Ledger()
        await draw(replace(group, seeds=[5, 6, 7, 8]), ledger)
        ledger.kept[2] = replace(ledger.kept[2], outcome=Outcome.FAILED, failure=Failure("exception", "x", False))
        for ordinal in (3, 4):
            del ledger.kept[ordinal]
        found = await draw(group, ledger, attempt=2)
        assert found == replace(expected, again=True)
        calls = len(ledger.calls)
        assert await draw(group, ledger, attempt=2) == found and len(ledger.calls) == calls, "all are there"


# ---- training


@dataclass
class Given:
    """An exchange that has the samples."""

    rows: list[Row]
    versions: Versions

    def begin(self, directory: Path, versions: Any) -> None: ...

    def rollouts(self, step: int) -> list[Row]:
        return self.rows

    def evaluation(self, step: int) -> list[Row]:
        return []


def trained(model: Path, directory: Path, rows: list[Row]) -> tuple[float, float, torch.Tensor]:
    """(loss, gradient's norm, a tensor after a step)."""
    given = {
        "base_model": str(model), "dataset": {"path": "rows.jsonl"}, "device": "cpu", "reward": ["games:digits"],
        "prompts_per_step": 1, "num_generations": 2, "optimizer": {"lr": 1e-2}, "budget": {"max_steps": 1},
        "importance_sampling_correction": "token_truncate", "num_iterations": 2,
    }  # fmt: skip
    section = SECTIONS["grpo"].model_validate(given)
    assert isinstance(section, GrpoSection)
    path = directory / "prompts"
    Prompts.save([Prompt(1, [70, 71], "p", {})], path)
    forget_accelerator()
    job = Job("grpo", section, path, str(model), 0)
    exchange = Given(rows, Versions(0, torch.float32))
    trainer = PolicyTrainer(job, make_policy_algorithm(section), lambda trainer: exchange)
    (metrics,) = trainer.run(0, 1)
    tensor = dict(trainer.policy.named_parameters())["lm_head.weight"].detach().clone()
    return metrics["loss"], metrics["grad_norm"], tensor


def test_nobody_learns_what_an_environment_said(tiny: Path, tmp_path: Path) -> None:
    def rows(other: float = 0.0, own: float = -3.0, learnt: list[int] | None = None) -> list[Row]:
        mask = [1, 1, 0, 0, 1] if learnt is None else learnt
        return [
            Row(0, 1, [70, 71], [80, 81, 90, 91, 82], [-3.0, own, other, other, -4.0], "stop", {}, 1.0, mask),
            Row(0, 1, [70, 71], [84, 85], [-2.0, -3.0], "stop", {}, 0.0, [1, 1]),
        ]

    loss, norm, weights = trained(tiny, tmp_path, rows())
    same = trained(tiny, tmp_path, rows(other=-9.0))
    assert (loss, norm) == same[:2] and torch.equal(weights, same[2])
    for control in (rows(own=-1.0), rows(learnt=[])):
        changed = trained(tiny, tmp_path, control)
        assert changed[1] != norm and not torch.equal(weights, changed[2])


def test_the_row_of_a_play_is_json() -> None:
    row = Play("a:B", CHAT, {"x": None}, [["a"], []], [True, False], 1, [1, 2], ["", ""], "t")
    assert Play(**json.loads(row.encode())) == row
