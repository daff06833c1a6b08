"""What a trainer leaves is what is loaded of it: outputs, tokenizer and template; and what differs is no export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rollout.model.errors import ConfigError
from rollout.processes.command import Finished
from rollout.snapshots.export import check_export, export_model
from rollout.workloads.train.config import Kind
from rollout_worker.backends.training import merge, probe, state
from rollout_worker.backends.training.trainer import RowTrainer, Trainer
from safetensors.torch import load_file, save_file
from training_jobs import MANIFEST, PAIRS, settings_of, tokens, trainer_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

PeftModel: Any = pytest.importorskip("peft").PeftModel
pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),  # peft: what is tested here
]

Any_: Any = AutoTokenizer
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in this process: to import torch again takes seconds."""

    def run(command: list[str], **_: Any) -> Finished:
        name, *arguments = command[command.index("-m") + 1 :] if "-m" in command else command[-4:]
        out = (
            json.dumps(probe.fault_of(Path(arguments[0]), Path(arguments[1]), arguments[2])) if "probe" in name else ""
        )
        if "merge" in name:
            merge.main(*arguments)
        return Finished(0, out, "")

    monkeypatch.setattr("rollout.snapshots.export.run", run)


def left(trainer: Trainer, directory: Path) -> Path:
    """The state after a few steps, unpacked."""
    for _ in trainer.run(0, 2):
        pass
    captured = trainer.capture(MANIFEST | {"algorithm": trainer.job.kind})
    assert captured is not None
    state.write(captured, directory)
    return directory


def with_tokenizer(tiny: Path, directory: Path, change: Callable[[Any], None]) -> Path:
    """The model with another tokenizer."""
    shutil.copytree(tiny, directory)
    tokenizer = Any_.from_pretrained(tiny)
    change(tokenizer)
    tokenizer.save_pretrained(directory)
    return directory


def trained(kind: Kind, model: Path, scratch: Path, tokenizer: Path | None = None, **more: Any) -> Path:
    rows = cast("list[dict[str, Any]] | None", more.pop("rows", None))
    data = tokens(kind, model, scratch / f"{kind}.tokens", rows)
    trainer = trainer_of(kind, settings_of(kind, model, **more), data)
    job = replace(trainer.job, tokenizer=str(tokenizer) if tokenizer else None)
    return left(RowTrainer(job, trainer.algorithm) if tokenizer else trainer, scratch / "state")


def test_the_tokenizer_and_the_template_of_a_run_are_in_its_snapshot(tmp_path: Path, tiny: Path, here: None) -> None:
    def other(tokenizer: Any) -> None:
        tokenizer.eos_token = "<|im_end|>"
        tokenizer.chat_template = "{{ messages[0]['content'] }}"

    where = with_tokenizer(tiny, tmp_path / "other", other)
    found: Any = None
    kinds: list[dict[str, Any]] = [{}, {"lora": {"r": 2}}]
    for n, lora in enumerate(kinds):
        scratch = tmp_path / str(n)
        scratch.mkdir()
        base = {"uri": str(tiny), "tokenizer": str(where), "chat_template": TEMPLATE}
        unpacked = trained("sft", tiny, scratch, where, base_model=base, **lora)
        export_model(unpacked, scratch / "out", base=str(tiny))
        found = Any_.from_pretrained(scratch / "out")
        assert (found.eos_token, found.chat_template) == ("<|im_end|>", TEMPLATE)
        assert check_export(unpacked, scratch / "out", str(tiny)) == ""
    out = tmp_path / "0" / "out"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == found.eos_token_id
    shutil.copy(tiny / "tokenizer_config.json", out)
    with pytest.raises(ConfigError, match="tokenizer has another eos token"):
        check_export(tmp_path / "0" / "state", out)


def no_pad(tokenizer: Any) -> None:
    tokenizer.pad_token = None


def pad_is_eos(tokenizer: Any) -> None:
    tokenizer.pad_token = tokenizer.eos_token


@pytest.mark.parametrize("change", [no_pad, pad_is_eos])
@pytest.mark.parametrize("chat", [False, True])
def test_a_reward_model_scores_the_token_that_training_did(
    tmp_path: Path, tiny: Path, here: None, change: Callable[[Any], None], chat: bool
) -> None:
    """Padding is the token that ends the rows, or there is none."""
    model = with_tokenizer(tiny, tmp_path / "model", change)
    given: dict[str, Any] = {"base_model": {"uri": str(model), "chat_template": TEMPLATE}} if chat else {}
    unpacked = trained("rm", model, tmp_path, **given)
    export_model(unpacked, tmp_path / "out")
    assert check_export(unpacked, tmp_path / "out") == ""
    tokenizer = Any_.from_pretrained(tmp_path / "out")
    texts = [row["prompt"] + row["chosen"] + tokenizer.eos_token for row in PAIRS]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        together = loaded(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([loaded(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    assert torch.allclose(together, alone, atol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"pad_token_id": tokenizer.eos_token_id}))
    with pytest.raises(ConfigError, match="scores differ"):
        check_export(unpacked, tmp_path / "out")


def test_without_a_token_to_pad_with_rows_are_scored_one_by_one(tmp_path: Path, tiny: Path, here: None) -> None:
    """Rather than with another token's score."""

    def full(tokenizer: Any) -> None:
        tokenizer.pad_token = None
        tokenizer.add_tokens([f"<{n}>" for n in range(600 - len(tokenizer))])

    model = with_tokenizer(tiny, tmp_path / "model", full)
    resized: Any = AutoModelForCausalLM.from_pretrained(model)
    resized.resize_token_embeddings(600)
    resized.save_pretrained(model)
    rows = [row | {"prompt": "<|pad|><|im_start|><|im_end|>" + row["prompt"]} for row in PAIRS]
    unpacked = trained("rm", model, tmp_path, rows=rows)
    export_model(unpacked, tmp_path / "out")
    assert check_export(unpacked, tmp_path / "out") == ""
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="batch"):
        loaded(torch.tensor([[5, 6], [7, 8]]))


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_on_tied_weights_is_merged_with_weights_of_their_own(
    tmp_path: Path, tied: Path, here: None, layer: str
) -> None:
    lora = {"r": 4, "target_modules": [layer, "q_proj"]}
    unpacked = trained("sft", tied, tmp_path, lora=lora, optimizer={"lr": 0.05})
    export_model(unpacked, tmp_path / "adapter", base=str(tied))
    assert check_export(unpacked, tmp_path / "adapter", str(tied)) == ""
    export_model(unpacked, tmp_path / "out", base=str(tied), merged=True)
    assert check_export(unpacked, tmp_path / "out") == ""
    wrong: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tied), tmp_path / "adapter")
    wrong.merge_and_unload().save_pretrained(tmp_path / "wrong")
    for path in tied.glob("*token*"):
        shutil.copy(path, tmp_path / "wrong")
    with pytest.raises(ConfigError, match="log-probabilities differ"):
        check_export(unpacked, tmp_path / "wrong")
    (tmp_path / "next").mkdir()
    go_on = trained("sft", tmp_path / "adapter", tmp_path / "next")  # it begins with the adapter merged
    export_model(go_on, tmp_path / "whole")
    assert check_export(go_on, tmp_path / "whole") == ""


def test_weights_that_differ_are_no_export(tmp_path: Path, tiny: Path, here: None) -> None:
    unpacked = trained("sft", tiny, tmp_path)
    export_model(unpacked, tmp_path / "out")
    assert check_export(unpacked, tmp_path / "out") == ""
    weights = load_file(tmp_path / "out" / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="differ"):
        check_export(unpacked, tmp_path / "out")
