"""Rows that share a sequence train as rows of their own, or are refused: by what a model computes, not by its name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.model.errors import AttemptError
from rollout_worker.backends.training.packing import _lengths
from rollout_worker.backends.training.trainer import Trainer
from training_jobs import settings_of, tokens, trainer_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::FutureWarning")]

WINDOW = 8
"""Shorter than rows are."""
PACKING = {"kind": "best_fit", "max_seq_len": 96}
SHAPE = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
LINEAR = {f"linear_{name}": size for name, size in (("num_value_heads", 4), ("num_key_heads", 2), ("key_head_dim", 8))}
KEPT_APART: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "attention": "eager"},
    "gemma3_text": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "cohere2": {"sliding_window": WINDOW},
    "llama4_text": {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "attention": "eager"},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
MIXED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": LINEAR | {
        "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 8, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "num_local_experts": 0, "shared_intermediate_size": 64,
    },
}  # fmt: skip


def trainer(directory: Path, tiny: Path, kind: str, *, packed: bool, **more: Any) -> Trainer:
    given = {name: more.pop(name) for name in ("attention", "precision") if name in more}
    config: Any = CONFIG_MAPPING[kind](**SHAPE, **more)
    model = directory / f"{kind}-{len(list(directory.iterdir()))}"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for path in tiny.glob("*token*"):
        shutil.copy(path, model)
    data = tokens("sft", tiny, directory / f"{packed}.tokens", pack=96 if packed else None)
    settings = settings_of("sft", model, packing=PACKING if packed else "off", minibatch_size=2, **given)
    return trainer_of("sft", settings, data)


def loss(*arguments: Any, **more: Any) -> float:
    found = trainer(*arguments, **more).evaluate()
    assert found is not None
    return found["loss"]


@pytest.mark.parametrize(("kind", "more"), KEPT_APART.items())
def test_packed_rows_have_the_loss_of_rows_alone(tmp_path: Path, tiny: Path, kind: str, more: dict[str, Any]) -> None:
    alone = loss(tmp_path, tiny, kind, packed=False, **more)
    assert loss(tmp_path, tiny, kind, packed=True, **more) == pytest.approx(alone, abs=1e-5)
    if wide := {key: 999 for key, value in more.items() if value == WINDOW}:
        assert abs(loss(tmp_path, tiny, kind, packed=False, **more | wide) - alone) > 1e-3


@pytest.mark.parametrize(("kind", "more"), MIXED.items())
def test_a_model_that_mixes_packed_rows_is_refused(tmp_path: Path, tiny: Path, kind: str, more: dict[str, Any]) -> None:
    """It has layers with a recurrent state or a convolution."""
    with pytest.raises(AttemptError, match=f'{kind}.*packing = "off"') as caught:
        trainer(tmp_path, tiny, kind, packed=True, **more)
    assert (caught.value.error_code, caught.value.retry) == ("bad_run_config", False)
    trainer(tmp_path, tiny, kind, packed=False, **more)


def test_half_precision_hides_no_leak(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(AttemptError, match="packing"):
        trainer(tmp_path, tiny, "lfm2", packed=True, precision="bf16", **MIXED["lfm2"])
    trainer(tmp_path, tiny, "llama", packed=True, precision="bf16")


@pytest.mark.parametrize(("row", "sequence"), [(1, 2), (3, 5), (20, 64), (64, 65), (500, 4096)])
def test_the_trial_has_rows_as_long_as_those_of_the_data(row: int, sequence: int) -> None:
    lengths = list(_lengths(row, sequence))
    assert sum(lengths) == sequence and min(lengths) > 0 and len(lengths) > 1
    assert max(lengths) <= row and (max(lengths) == row or sequence < 3 * row)
