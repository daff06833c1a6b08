"""Answers from engines of the cluster: `engine` of job.yaml, and generations as children of a trial's item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from job_files import make_task
from rollout.model.errors import AttemptError, ConfigError
from rollout.model.item import DEFAULT_SPEC, Failure, Key, NewItem, Outcome
from rollout.workloads.job.config import AgentSection, JobConfig, asks_engine
from rollout.workloads.job.datasets import load_datasets
from rollout.workloads.job.engine import EngineSection, resolve_engine
from rollout.workloads.job.plan import plan
from rollout_worker.executors.infer import InferExecutor
from rollout_worker.executors.port import Attempt, Child, Context, Run
from rollout_worker.trials.agents.cluster_engine import ClusterEngine
from rollout_worker.trials.port import TrialFault, UsageCount
from test_infer_executor import FakeContext

ITEM = b"t" * 32
MOCK = {"model": {"uri": "m"}, "backend": {"kind": "mock"}}


class Family:
    """The children of one item, as the coordinator keeps them: by ordinal, ids compared, for every try at it."""

    def __init__(self, executor: InferExecutor, run: Run, context: Context) -> None:
        self.executor, self.of_run, self.context = executor, run, context
        self.items: list[NewItem] = []
        self.results: dict[int, Child] = {}
        self.silent = False  # nothing is answered
        self.asked = asyncio.Event()

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True, **_: Any) -> None:
        assert not seal, "a later try could ask nothing"
        for ordinal, item in enumerate(items, first_ordinal):
            assert ordinal <= len(self.items), "a gap"
            if ordinal < len(self.items):
                assert self.items[ordinal].id == item.id, "spawn_conflict: the trial would end for good"
            else:
                assert item.spec.executor == "infer"
                self.items.append(item)
                self.asked.set()

    async def children(self, from_child: int = 0, *, holds_slot: bool = False) -> AsyncIterator[Child]:
        for ordinal in range(from_child, 1 << 30):
            while ordinal >= len(self.items) or (self.silent and ordinal not in self.results):
                await asyncio.Event().wait()
            if ordinal not in self.results:
                self.results[ordinal] = await self._ran(ordinal)
            yield self.results[ordinal]

    async def _ran(self, ordinal: int) -> Child:
        item = self.items[ordinal]
        assert isinstance(item.payload, bytes)
        attempt = Attempt(Key(2, ordinal), 1, item.id, item.payload, DEFAULT_SPEC, self.of_run, Key(1, 0))
        try:
            done = await self.executor.run(attempt, self.context)
        except AttemptError as error:
            return Child(ordinal, Outcome.FAILED, b"", Failure(error.error_code, error.message, error.retry))
        return Child(ordinal, Outcome.DONE, done.data, None)


async def family(tmp_path: Path, **backend: Any) -> Family:
    section = EngineSection.model_validate({**MOCK, "backend": {"kind": "mock", **backend}})
    run = Run("01J00000000000000000000000", "job", {"executors": {"infer": resolve_engine(section).config}})
    context = FakeContext(tmp_path)
    executor = InferExecutor()
    await executor.start(run.seen_by("infer"), context)
    return Family(executor, run.seen_by("infer"), context)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_an_answer_is_counted(tmp_path: Path) -> None:
    usage = UsageCount()
    engine = ClusterEngine(ITEM, 1, await family(tmp_path), usage)
    assert (await engine.ask(user("hello you"), temperature=0.0)).text == "MOCK:user: hello you"
    cut = await engine.ask(user("one two three"), max_tokens=2)
    assert (cut.text, cut.finish_reason, cut.input_tokens, cut.output_tokens) == ("MOCK:user: one", "length", 4, 2)
    assert (usage.input_tokens, usage.output_tokens) == (7, 5)


async def test_several_at_once_are_asked_one_by_one(tmp_path: Path) -> None:
    engine = ClusterEngine(ITEM, 1, await family(tmp_path), UsageCount())
    replies = await asyncio.gather(*(engine.ask(user(str(n))) for n in range(4)))
    assert [reply.text for reply in replies] == [f"MOCK:user: {n}" for n in range(4)]


async def test_a_try_that_goes_another_way_is_not_answered_what_the_one_before_asked(tmp_path: Path) -> None:
    children = await family(tmp_path)
    first = ClusterEngine(ITEM, 1, children, UsageCount())
    for text in ("a", "b", "c"):
        await first.ask(user(text))
    usage = UsageCount()
    second = ClusterEngine(ITEM, 2, children, usage)
    said = [(await second.ask(user(text))).text for text in ("a", "other", "more")]
    assert said == ["MOCK:user: a", "MOCK:user: other", "MOCK:user: more"]
    assert len(children.items) == 5, "the first answer is the same; two of the first try are passed over"
    assert usage.input_tokens == 6


async def test_a_try_does_not_fail_for_what_the_one_before_failed_for(tmp_path: Path) -> None:
    children = await family(tmp_path, fail_match="poison")
    first = ClusterEngine(ITEM, 1, children, UsageCount())
    await first.ask(user("a"))
    with pytest.raises(TrialFault, match="the engine: the prompt contains 'poison'") as caught:
        await first.ask(user("poison"))
    assert caught.value.type == "api_unreachable"
    second = ClusterEngine(ITEM, 2, children, UsageCount())
    await second.ask(user("a"))
    assert (await second.ask(user("b"))).text == "MOCK:user: b"
    with pytest.raises(TrialFault):
        await second.ask(user("poison"))


async def test_trials_of_one_process_have_children_of_their_own(tmp_path: Path) -> None:
    one, two = await family(tmp_path), await family(tmp_path)
    engines = [ClusterEngine(bytes([n]) * 32, 1, children, UsageCount()) for n, children in enumerate((one, two))]
    await asyncio.gather(*(engine.ask(user("x")) for engine in engines))
    assert one.items[0].id != two.items[0].id


async def test_after_time_ran_out_a_step_may_ask_again(tmp_path: Path) -> None:
    children = await family(tmp_path)
    engine = ClusterEngine(ITEM, 1, children, UsageCount())
    children.silent = True
    asking = asyncio.create_task(engine.ask(user("late")))
    await children.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    children.silent = False
    assert (await engine.ask(user("next"))).text == "MOCK:user: next"


@pytest.mark.parametrize(
    ("backend", "text", "sampling", "expected"),
    [
        ({"max_model_len": 5000}, "x " * 6000, {}, "agent_context_window_exceeded"),
        ({}, "x", {"top_p": 7}, "api_bad_request"),
        ({"fail_rate": 1.0}, "x", {}, "api_unreachable"),
    ],
)
async def test_what_the_engine_refuses_has_a_type(
    tmp_path: Path, backend: dict[str, Any], text: str, sampling: dict[str, Any], expected: str
) -> None:
    engine = ClusterEngine(ITEM, 1, await family(tmp_path, **backend), UsageCount())
    with pytest.raises(TrialFault) as caught:
        await engine.ask(user(text), **sampling)
    assert caught.value.type == expected


# The key `engine`


def test_what_a_run_is_told_of_its_engine(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    sampling = {"temperature": 0.0}
    section = EngineSection.model_validate(
        {"model": {"uri": str(model)}, "backend": {"kind": "transformers"}, "sampling": sampling}
    )
    found = resolve_engine(section)
    assert (found.config["sampling"]["temperature"], found.config["sampling"]["max_tokens"]) == (0.0, 4096)
    assert [(tree.key, tree.path) for tree in found.trees] == [("executors.infer.model.manifest", model)]
    assert found.content_id
    of_snapshot = resolve_engine(EngineSection.model_validate({"model": {"uri": "run:01J"}}))
    assert (of_snapshot.snapshots, of_snapshot.trees) == (("executors.infer.model",), ())


def test_faults_of_the_engine_are_told_at_its_keys() -> None:
    section = EngineSection.model_validate({"model": {"uri": "./nowhere"}, "backend": {"kind": "vlm"}})
    with pytest.raises(ConfigError) as caught:
        resolve_engine(section)
    assert 'engine.backend.kind: unknown backend "vlm"' in str(caught.value)
    assert "engine.model.uri: there is no directory ./nowhere" in str(caught.value)


def test_the_engine_is_a_part_of_the_trials_that_ask_it(tmp_path: Path) -> None:
    make_task(tmp_path / "d" / "task")

    def ids(model: str = "", **engine: Any) -> list[bytes]:
        values = {"agents": [{"name": "shell-loop"}, {"name": "nop"}], "datasets": [{"path": str(tmp_path / "d")}]}
        config = JobConfig.model_validate({**values, "engine": {**MOCK, **engine}})
        return [trial.id for trial in plan(config, load_datasets(config).datasets, model)]

    asks, does_not = ids()
    assert ids(backend={"kind": "mock", "delay_ms": 5.0}) == [asks, does_not], "how fast it is changes no answer"
    for other in (ids(sampling={"temperature": 2.0}), ids(model="weights")):
        assert other[0] != asks
        assert other[1] == does_not


def test_which_agents_ask_the_engine() -> None:
    config = JobConfig.model_validate({"agents": [{"name": "nop"}], "engine": MOCK, "datasets": [{"path": "d"}]})
    for agent, asks in (
        (AgentSection(name="shell-loop"), True),
        (AgentSection(name="shell-loop", model_name="engine"), True),
        (AgentSection(import_path="a:B"), True),
        (AgentSection(import_path="a:B", model_name="gpt"), False),
        (AgentSection(name="shell-loop", base_url="http://x", model_name="m"), False),
        (AgentSection(name="claude-code"), False),
        (AgentSection(name="mine", execute="x"), False),
    ):
        assert asks_engine(agent, config) is asks
