"""Groups of rollouts on the transformers engine: their bytes are a function of the group alone, versions included."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from blake3 import blake3
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, Key
from rollout.workloads.train.rollouts import (
    Answer,
    Ask,
    Group,
    GroupResult,
    Sample,
    TrialPolicy,
    Weights,
    WeightsManifest,
)
from rollout_worker.backends.environment import engine_environment
from rollout_worker.backends.training.publish import publish
from rollout_worker.executors.port import WEIGHTS_GONE, Attempt, Context, Run, UnsuitableError
from rollout_worker.executors.rollout import RolloutExecutor
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.engine

PROMPTS = ([70, 71, 72, 73], [90, 91, 92, 93, 94, 95, 96], [101])


@dataclass
class Store:
    """Objects, and the versions of a policy among them. `gone`: objects that are not there."""

    directory: Path
    versions: list[Weights] = field(default_factory=list[Weights])
    last: WeightsManifest = field(default_factory=lambda: WeightsManifest(-1, {}))
    gone: set[str] = field(default_factory=set[str])
    fetched: list[str] = field(default_factory=list[str])

    def put(self, data: bytes) -> str:
        name = blake3(data).hexdigest()
        (self.directory / name).write_bytes(data)
        return name

    async def object_path(self, object_id: bytes) -> Path:
        self.fetched.append(object_id.hex())
        if object_id.hex() in self.gone:
            raise AttemptError("gone", code="not_found")
        return self.directory / object_id.hex()

    def hindered(self, message: str, *, code: str = "") -> None: ...

    def publish(self, tensors: dict[str, torch.Tensor]) -> Weights:
        path = self.directory / "written"
        made = publish(tensors, self.last.hashes, path, torch.float32)
        file = self.put(path.read_bytes())
        self.last = self.last.followed_by(len(self.versions), made.hashes, made.written, file)
        self.versions.append(Weights(self.last.version, self.put(self.last.encode())))
        return self.versions[-1]


@pytest.fixture(scope="module")
def store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Version 0 is the model as it is; 1 has other weights in one layer, 2 everywhere, and 3 no preference at all."""
    found = Store(tmp_path_factory.mktemp("objects"))
    weights = {name: tensor.clone() for name, tensor in model_of(tiny).named_parameters()}
    found.publish(weights)
    generator = torch.Generator().manual_seed(5)
    for names in ([name for name in weights if ".layers.1." in name], list(weights)):
        for name in names:
            weights[name] = weights[name] + 0.05 * torch.randn(weights[name].shape, generator=generator)
        found.publish(weights)
    found.publish(weights | {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])})
    return found


def model_of(directory: Path) -> Any:
    models: Any = AutoModelForCausalLM
    return models.from_pretrained(directory, dtype=torch.float32)


@asynccontextmanager
async def started(model: Path, store: Store, **section: Any) -> AsyncIterator[Any]:
    """An engine; called with a group it gives the group's bytes."""
    backend = {"kind": "transformers", "dtype": "float32", "device": "cpu", "max_model_len": 128}
    config = {"model": {"uri": str(model)}, "backend": backend, "groups_at_once": 3, **section}
    run, context = Run("01J00000000000000000000000", "train", config, executor="rollout"), cast(Context, store)
    executor = RolloutExecutor()
    await executor.start(run, context)

    async def draw(group: Group | Ask) -> bytes:
        attempt = Attempt(Key(1, getattr(group, "index", 0)), 1, b"i" * 32, group.encode(), DEFAULT_SPEC, run)
        return (await executor.run(attempt, context)).data

    try:
        yield draw
    finally:
        await executor.close()


def group_of(weights: Weights, prompt: int = 0, seeds: tuple[int, ...] = (1, 2, 3, 4), **more: Any) -> Group:
    return Group(0, 0, PROMPTS[prompt], list(seeds), more.pop("max_tokens", 12), weights, temperature=0.7, **more)


def samples_of(data: bytes) -> list[Sample]:
    return GroupResult.decode(data).samples


async def test_bytes_are_a_function_of_the_group(tiny: Path, store: Store) -> None:
    """Not of neighbours, order, what the engine held before, nor of whether it is new."""
    groups = [group_of(version, prompt) for version in store.versions[:3] for prompt in range(3)]
    alone: list[bytes] = []
    for group in groups:
        async with started(tiny, store) as draw:
            alone.append(await draw(group))
    assert len(set(alone)) == len(groups)
    async with started(tiny, store) as draw:
        for order in (range(9), range(8, -1, -1), (0, 3, 6, 1, 4, 7, 2, 5, 8)):
            found = await asyncio.gather(*(draw(groups[place]) for place in order))
            assert found == [alone[place] for place in order]


async def test_only_what_changed_is_fetched(tiny: Path, store: Store) -> None:
    async with started(tiny, store) as draw:
        counts: list[int] = []
        for version in (0, 1, 1, 2, 0):
            store.fetched.clear()
            await draw(group_of(store.versions[version], max_tokens=1))
            counts.append(len(store.fetched))
        assert counts == [2, 2, 0, 2, 2]  # the manifest and one file


async def test_a_seed_is_of_its_sample_alone(tiny: Path, store: Store) -> None:
    async with started(tiny, store) as draw:
        group = replace(group_of(store.versions[0], max_tokens=30, seeds=(1, 2)), temperature=2.0)
        before = samples_of(await draw(group))
        after = samples_of(await draw(replace(group, seeds=[1, 99])))
        # It leaves the other alone, which a model reads in other operations than two.
        assert len(after[1].ids) < 30 == len(before[1].ids)
        assert after[0] == before[0]


async def test_ids_and_logprobs_are_the_models_own(tiny: Path, store: Store) -> None:
    async with started(tiny, store) as draw:
        samples = samples_of(await draw(group_of(store.versions[0], 1)))
    for sample in samples:
        assert_own_logprobs(model_of(tiny), group_of(store.versions[0], 1), sample, 1e-5)
        assert sample.versions == [[0, len(sample.ids)]] and sample.text


def assert_own_logprobs(model: Any, group: Group, sample: Sample, tolerance: float) -> None:
    """Those of the sample's tokens are what the model gives in one pass; of a greedy sample, the tokens too."""
    with torch.no_grad():
        logits = model(torch.tensor([group.prompt + sample.ids])).logits[0, len(group.prompt) - 1 : -1]
    expected = (logits / (group.temperature or 1)).log_softmax(-1)[range(len(sample.ids)), sample.ids]
    torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=tolerance, rtol=1e-5)
    assert group.temperature or logits.argmax(-1).tolist() == sample.ids


async def test_a_turn_of_an_agent_goes_on_behind_the_ids_that_were_drawn(tiny: Path, store: Store) -> None:
    weights = store.versions[0]
    policy = TrialPolicy(weights, 5, 0.7, 0.7, 40, 60, 4, [], [], 3)
    asked = [{"role": "user", "content": "say 1"}]
    tokens = cast(Any, AutoTokenizer).from_pretrained(tiny)
    async with started(tiny, store) as draw:
        one = await draw(Ask(policy, asked, 11, tag="a", max_tokens=6))
        assert one == await draw(Ask(policy, asked, 11, tag="a", max_tokens=6))
        first = Answer.decode(one)
        assert tokens.decode(first.prompt) == tokens.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        assert (len(first.ids), first.finish_reason, first.cut, first.tag) == (6, "length", False, "a")
        so_far, began = [*first.prompt, *first.ids], len(first.prompt)
        more = [*asked, {"role": "assistant", "content": first.text.strip()}, {"role": "user", "content": "again"}]
        second = Answer.decode(await draw(Ask(policy, more, 12, so_far, began, 2)))
        added = tokens.decode(second.prompt)
        assert added == "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
        assert second.cut and second.finish_reason == "length" and len(second.ids) == 40 - 6 - len(second.prompt)
        stop = first.text[-1]
        ended = Answer.decode(await draw(Ask(policy, asked, 11, stop=[stop])))
        assert ended.finish_reason == "stop" and stop not in ended.text
        full = Answer.decode(await draw(Ask(policy, more, 13, [*so_far, *[5] * 40], began, 2)))
        long = Answer.decode(await draw(Ask(policy, [{"role": "user", "content": "x" * 500}], 14)))
        for one in (full, long):
            assert one.fault is not None and one.fault[0] == "agent_context_window_exceeded" and one.cut and not one.ids
    group = replace(group_of(weights), prompt=[*so_far, *second.prompt])
    drawn = Sample(second.ids, second.logprobs, "length", 12, "", [])
    assert_own_logprobs(model_of(tiny), group, drawn, 1e-5)


async def test_what_ends_a_sample(tiny: Path, store: Store) -> None:
    eos = set(model_of(tiny).generation_config.eos_token_id)
    async with started(tiny, store) as draw:
        long = samples_of(await draw(group_of(store.versions[0])))
        assert {(len(s.ids), s.finish_reason) for s in long} == {(12, "length")}
        stop = long[2].ids[5]
        (cut,) = samples_of(await draw(group_of(store.versions[0], seeds=(3,), stop=[stop])))
        assert (cut.ids, cut.finish_reason) == (long[2].ids[: long[2].ids.index(stop) + 1], "stop")
        ended = samples_of(await draw(group_of(store.versions[3], seeds=tuple(range(40)), max_tokens=1000)))
        assert {sample.finish_reason for sample in ended} == {"stop", "length"}
        for sample in ended:
            assert (sample.ids[-1] in eos) == (sample.finish_reason == "stop")
            assert not eos & set(sample.ids[:-1])
            assert sample.finish_reason == "stop" or len(sample.ids) == 128 - len(PROMPTS[0]), "the context is full"


async def test_an_engine_never_holds_half_of_a_version(tiny: Path, store: Store) -> None:
    group = group_of(store.versions[0])
    other = group_of(store.versions[2])
    spoilt = store.last.tensors | {"model.norm.weight": store.last.tensors["lm_head.weight"]}  # the last in its file
    broken = Weights(9, store.put(WeightsManifest(9, spoilt).encode()))
    async with started(tiny, store) as draw:
        expected, of_other = await draw(group), await draw(other)
        store.gone = {file for file, _ in WeightsManifest.decode(read(store, store.versions[0])).tensors.values()}
        with pytest.raises(UnsuitableError) as caught:
            await draw(group)
        assert (caught.value.error_code, caught.value.retry) == (WEIGHTS_GONE, True)
        assert await draw(other) == of_other
        store.gone = set()
        with pytest.raises(AttemptError):
            await draw(replace(group, weights=broken))
        assert await draw(other) == of_other
        assert await draw(group) == expected


def read(store: Store, weights: Weights) -> bytes:
    return (store.directory / weights.manifest).read_bytes()


@pytest.mark.parametrize(
    ("group", "code"),
    [(lambda w: replace(group_of(w), prompt=[70] * 128), "prompt_too_long"),
     (lambda w: replace(group_of(w), prompt=[70, 5000]), "bad_request")],
)  # fmt: skip
async def test_a_prompt_that_cannot_be(tiny: Path, store: Store, group: Any, code: str) -> None:
    async with started(tiny, store) as draw:
        with pytest.raises(AttemptError) as error:
            await draw(group(store.versions[0]))
        assert (error.value.error_code, error.value.retry) == (code, False)


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tiny", "tied"])
async def test_vllm_holds_what_a_new_one_would(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """After a switch, and of prompts that are in its prefix cache; of a part of a layer, and there and back."""
    directory, store = cast(Path, request.getfixturevalue(name)), Store(tmp_path)
    backend = {"kind": "vllm", "dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 16}
    os.environ.update(engine_environment(backend, local_model=True))
    models = [model_of(directory) for _ in range(3)]
    with torch.no_grad():
        models[1].model.layers[0].self_attn.q_proj.weight.copy_(models[0].model.layers[1].self_attn.k_proj.weight)
        for parameter in models[2].parameters():
            parameter.mul_(1.1)
    for model in models:
        store.publish(dict(model.named_parameters()))
    prompt = [70 + n * n % 97 for n in range(300)]  # a block of the cache is 128 tokens
    groups = [
        replace(group_of(version, max_tokens=16), prompt=prompt, temperature=0.0, seeds=[1, 2])
        for version in store.versions
    ]
    warm = replace(groups[0], temperature=0.7, seeds=[1, 2, 3, 4])
    found: dict[int, Sample] = {}
    async with started(directory, store, backend=backend) as draw:
        for order in ((0, 1, 2), (2, 1, 0)):
            for place, data in zip(order, await asyncio.gather(*(draw(groups[n]) for n in order)), strict=True):
                for sample in samples_of(data):
                    assert sample.ids == found.setdefault(place, sample).ids
                    assert_own_logprobs(models[place], groups[place], sample, 1e-3)
        assert found[0].ids != found[1].ids != found[2].ids
        drawn = samples_of(await draw(warm))
        (cut,) = samples_of(await draw(replace(warm, seeds=[2], stop=[drawn[1].ids[5]])))
    assert len({tuple(sample.ids) for sample in drawn}) == 4 and all(sample.text for sample in drawn)
    for sample in drawn:
        assert_own_logprobs(models[0], warm, sample, 1e-3)
    assert cut.ids == drawn[1].ids[: drawn[1].ids.index(drawn[1].ids[5]) + 1] and cut.finish_reason == "stop"
    if name == "tied":
        return
    shutil.copytree(directory, tmp_path / "new")
    models[1].save_pretrained(tmp_path / "new")
    async with started(tmp_path / "new", Store(tmp_path), backend=backend) as draw:
        nothing = Weights(0, store.put(WeightsManifest(0, {}).encode()))
        (sample, _) = samples_of(await draw(replace(groups[1], weights=nothing)))
        assert sample.ids == found[1].ids and sample.logprobs == pytest.approx(found[1].logprobs, abs=1e-4)


async def test_a_backend_that_takes_no_weights(store: Store) -> None:
    with pytest.raises(AttemptError) as error:
        async with started(Path("m"), store, backend={"kind": "mock"}):
            pass
    assert error.value.error_code == "bad_run_config"
