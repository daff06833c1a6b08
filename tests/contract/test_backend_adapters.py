"""LoRA adapters: rows of several in one batch give what models that have them merged give."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import AttemptError
from rollout_worker.backends.environment import engine_environment
from rollout_worker.backends.opening import open_backend
from rollout_worker.backends.port import BackendOptions, Embed, Request, Sampling

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
torch = pytest.importorskip("torch")
KINDS = [
    pytest.param("transformers", marks=pytest.mark.engine),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]),
]
PROMPT = "What is the sum of 12 and 30?"
RANK, ALPHA = 4, 8
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def make_adapter(tiny: Path, directory: Path, seed: int) -> Path:
    """An adapter of `tiny`, and beside it `tiny` with it merged: DIRECTORY-merged."""
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(seed)
    merged = directory.with_name(f"{directory.name}-merged")
    shutil.copytree(tiny, merged)
    weights: dict[str, Any] = load_file(tiny / "model.safetensors")
    adapter: dict[str, Any] = {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]:
        out, wide = weights[name].shape
        a, b = torch.randn(RANK, wide, generator=draw) * 0.2, torch.randn(out, RANK, generator=draw) * 0.2
        place = f"base_model.model.{name.removesuffix('.weight')}"
        adapter |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
        weights[name] = weights[name] + b @ a * (ALPHA / RANK)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    directory.mkdir()
    save_file(adapter, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(tiny), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout_worker.backends.tiny import make_tiny

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    for name, seed in (("one", 1), ("two", 2)):
        make_adapter(directory, directory.with_name(name), seed)
    return directory


def generated(directory: Path) -> str:
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=GREEDY.max_tokens, do_sample=False)[0][ids["input_ids"].shape[1] :]
    return tokenizer.decode(found, skip_special_tokens=True)


def options(kind: str, model: Path, adapters: dict[str, Path]) -> BackendOptions:
    given = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
    os.environ.update(engine_environment({"kind": kind, **given}, local_model=True))
    places = {name: str(path) for name, path in adapters.items()}
    return BackendOptions(model=str(model), kind=kind, options=given, adapters=places)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_row_has_the_adapter_that_it_names(kind: str, tiny: Path) -> None:
    one, two = tiny.with_name("one"), tiny.with_name("two")
    merged = {name: generated(tiny.with_name(f"{path}-merged")) for name, path in (("a", "one"), ("b", "two"))}
    expected = {"": generated(tiny), **merged}
    assert len(set(expected.values())) == 3, "the test proves nothing"
    backend = open_backend(options(kind, tiny, {"a": one, "b": two}))
    await backend.start()
    names = ["", "a", "b", "a", "", "b"]
    requests = [Request(f"r-{at}", GREEDY, PROMPT, adapter=name) for at, name in enumerate(names)]
    done = await asyncio.gather(*map(backend.generate, requests))
    await backend.close()
    assert [completion.choices[0].text for completion in done] == [expected[name] for name in names]


@pytest.mark.engine
async def test_an_adapter_without_a_name_is_of_every_row_and_of_embeddings(tiny: Path) -> None:
    backend = open_backend(options("transformers", tiny, {"": tiny.with_name("one")}))
    merged = open_backend(options("transformers", tiny.with_name("one-merged"), {}))
    rows = [Request("t", GREEDY, PROMPT), Request("e", GREEDY, embed=Embed(PROMPT))]
    answers: list[list[Any]] = []
    for each in (backend, merged):
        await each.start()
        answers.append([await each.generate(row) for row in rows])
        await each.close()
    (text, vector), (its_text, its_vector) = answers
    assert text.choices[0].text == its_text.choices[0].text
    assert vector.embeddings[0] == pytest.approx(its_vector.embeddings[0], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS[:1])
async def test_what_is_no_adapter_of_the_model_ends_the_start(kind: str, tiny: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny.with_name("one"), tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["nothing_of_it"]}))
    with pytest.raises(AttemptError) as error:
        await open_backend(options(kind, tiny, {"a": other})).start()
    assert error.value.error_code == "model_load_failed" and str(other) in error.value.message
