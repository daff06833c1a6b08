"""The transformers backend against the library's own generate(), and what only it can get wrong."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import AttemptError, ConfigError
from rollout_worker.backends.port import BackendOptions, Embed, Request, Sampling

pytestmark = pytest.mark.engine
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout_worker.backends.tiny import make_tiny

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    return directory


def options(tiny: Path, **more: Any) -> BackendOptions:
    return BackendOptions(model=str(tiny), kind="transformers", options={"device": "cpu", "max_num_seqs": 6, **more})


async def test_greedy_is_that_of_generate(tiny: Path) -> None:
    """Rows join and leave a batch of six all the time; every one must equal a generate() of its own."""
    from rollout_worker.backends.transformers import open_backend

    backend = open_backend(options(tiny))
    await backend.start()
    draw = random.Random(0)
    words = [
        "the",
        "worker",
        "gives",
        "work",
        "back",
        "to",
        "12",
        "and",
        "30",
        "{",
        "}",
        ",",
        "is",
        "what",
        "user",
        "hello",
    ]
    rows = [(" ".join(draw.choices(words, k=draw.randint(1, 40))), draw.randint(1, 40)) for _ in range(40)]
    requests = [
        Request(f"r{at}", Sampling(temperature=0, max_tokens=limit), prompt=prompt)
        for at, (prompt, limit) in enumerate(rows)
    ]
    completions = await asyncio.gather(*(backend.generate(request) for request in requests))
    await backend.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    for (prompt, limit), completion in zip(rows, completions, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
        new = out[0, ids.shape[1] :]
        assert completion.choices[0].tokens == len(new)
        assert completion.choices[0].text == tokenizer.decode(new, skip_special_tokens=True)


def encoder(directory: Path, tiny: Path, pooling: dict[str, bool]) -> Path:
    """A random BERT with the files that sentence-transformers leaves beside a model."""
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertModel(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, directory)
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize("model", ["causal", "encoder"])
async def test_embeddings_are_the_pooled_states_of_the_model(tiny: Path, tmp_path: Path, model: str) -> None:
    from rollout_worker.backends.transformers import open_backend

    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    directory = tiny if model == "causal" else encoder(tmp_path / "bert", tiny, modes)
    backend = open_backend(options(directory))
    await backend.start()
    texts = ["the worker", "hello", "and 12 and 30 is what the user gives back"]
    requests = [Request(f"r{at}", Sampling(), embed=Embed(text)) for at, text in enumerate(texts)]
    completions = await asyncio.gather(*(backend.generate(request) for request in requests))
    short = await backend.generate(Request("short", Sampling(), embed=Embed(texts[0], dimensions=4)))
    await backend.close()
    found = [completion.embeddings[0] for completion in completions if completion.embeddings]
    base = transformers.AutoModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = base(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        pooled = states[-1] if model == "causal" else states.mean(dim=0)
        assert vector == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-5)
    first = torch.tensor(found[0][:4])
    assert short.embeddings and short.embeddings[0] == pytest.approx((first / first.norm()).tolist(), abs=1e-5)


async def test_a_model_without_text_writes_none(tiny: Path, tmp_path: Path) -> None:
    from rollout_worker.backends.transformers import open_backend

    backend = open_backend(options(encoder(tmp_path / "bert", tiny, {"pooling_mode_max_tokens": True})))
    await backend.start()
    for request in (Request("a", Sampling(), prompt="x"), Request("b", Sampling(), embed=Embed("x"))):
        with pytest.raises(AttemptError) as caught:
            await backend.generate(request)
        assert (caught.value.error_code, caught.value.retry) == ("bad_request", False)
    await backend.close()


def test_sampling_follows_the_distribution() -> None:
    from rollout_worker.backends.sampling import RowState, next_tokens

    scores = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def counts(**more: Any) -> list[float]:
        row = RowState(Sampling(**more), [0], [], random.Random(1), frozenset({3}))
        seen = collections.Counter(next_tokens(scores[None].clone(), [row])[0] for _ in range(4000))
        return [seen[token] / 4000 for token in range(4)]

    assert counts() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert counts(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(top_p=0.8) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(top_p=0.81)[2] > 0
    assert counts(min_p=0.4) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(min_tokens=1)[3] == 0
    squares = [0.25, 0.09, 0.0225, 0.0025]
    assert counts(temperature=0.5) == pytest.approx([s / sum(squares) for s in squares], abs=0.03)
    assert counts(temperature=0) == [1, 0, 0, 0]


def test_tiny_is_deterministic_and_seeded(tiny: Path, tmp_path: Path) -> None:
    from rollout_worker.backends.tiny import make_tiny

    make_tiny(tmp_path / "again")
    make_tiny(tmp_path / "other", seed=1)
    names = sorted(path.name for path in tiny.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((tiny / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    weights = "model.safetensors"
    assert (tiny / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(ConfigError, match="holds something else"):
        make_tiny(tmp_path / "mine")


async def test_a_random_model_of_another_shape_runs(tmp_path: Path) -> None:
    """Half precision, tied embeddings, fewer heads of keys than of queries, and a vocabulary beyond what was learned."""
    from rollout_worker.backends.tiny import TINY, make_random
    from rollout_worker.backends.transformers import open_backend

    shape = replace(TINY, layers=1, hidden=64, intermediate=96, kv_heads=1, head_dim=32, vocabulary=3000)
    shape = replace(shape, tied=True, dtype="bfloat16")
    make_random(tmp_path / "model", shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert sum(weights.numel() for weights in model.parameters()) == shape.parameters
    assert TINY.parameters == 459_392
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == shape.vocabulary
    assert tokenizer.decode([2999, 600]) == " <2999> <600>"
    assert max(tokenizer.encode("a <2999> is no token of a text")) < 512
    backend = open_backend(options(tmp_path / "model"))
    await backend.start()
    sampling = Sampling(temperature=1.0, max_tokens=40, ignore_eos=True, seed=0)
    done = await backend.generate(Request("1", sampling, "a prompt", None))
    await backend.close()
    assert (done.choices[0].tokens, done.choices[0].finish_reason) == (40, "length")
    assert "<" in done.choices[0].text  # four tokens in five have no text but their name


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"device": "cuda"}, "is_available"),
        ({"max_model_len": 4096}, "the model holds 2048 tokens"),
        ({"engine": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}}, "pip install"),
    ],
)
async def test_start_says_what_is_wrong(tiny: Path, more: dict[str, Any], message: str) -> None:
    from rollout_worker.backends.transformers import open_backend

    if more.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(AttemptError, match=message) as error:
        await open_backend(options(tiny, **more)).start()
    assert not error.value.retry


async def test_missing_model(tmp_path: Path) -> None:
    from rollout_worker.backends.transformers import open_backend

    with pytest.raises(AttemptError, match="is no directory on this worker and no name of the hub") as error:
        await open_backend(options(tmp_path / "none")).start()
    assert error.value.error_code == "model_missing"


def waiting(length: int, at: int = 0) -> Any:
    from rollout_worker.backends.batch import Sequence

    return Sequence([7] * length, Sampling(), at, lambda _: None, 16, frozenset())


def test_prompts_of_like_length_join_together_and_the_oldest_is_among_them() -> None:
    from rollout_worker.backends.batch import ContinuousBatch, passes

    batch = ContinuousBatch(None, None, "cpu", 3)  # type: ignore[arg-type]
    batch.submit([waiting(length) for length in (500, 10, 11, 480, 12, 900, 510, 13)])
    admitted = [[len(sequence.prompt) for sequence in batch._admit()] for _ in range(3)]
    assert admitted == [[500, 510, 480], [10, 11, 12], [900, 13]]
    together = [waiting(length) for length in (16, 900, 64, 500, 100, 20)]
    assert [[len(one.prompt) for one in part] for part in passes(together)] == [[900, 500], [100, 64], [20, 16]]


async def test_a_step_that_fails_fails_its_rows_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_worker.backends.batch import ContinuousBatch
    from rollout_worker.backends.transformers import open_backend

    backend = open_backend(options(tiny))
    await backend.start()
    real = ContinuousBatch._decode
    calls = 0

    def decode(self: ContinuousBatch) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("device-side assert")
        real(self)

    monkeypatch.setattr(ContinuousBatch, "_decode", decode)
    request = Request("a", Sampling(temperature=0, max_tokens=8, ignore_eos=True), prompt="hello")
    with pytest.raises(AttemptError, match="device-side assert") as error:
        await backend.generate(request)
    assert error.value.retry
    assert (await backend.generate(request)).choices[0].tokens == 8
    await backend.close()
    with pytest.raises(AttemptError):
        await backend.generate(request)
