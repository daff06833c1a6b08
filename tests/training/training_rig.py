"""Trainers in this process, on models that are made in a moment: what the tests of training have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rollout.snapshots.tar import pack
from rollout.workloads.train.config import SECTIONS, Kind
from rollout.workloads.train.dataset import Dataset
from rollout_worker.algorithms.registered import make_algorithm
from rollout_worker.backends.training import state
from rollout_worker.backends.training.prepare import Files, prepare, read_tokenizer
from rollout_worker.backends.training.trainer import Job, RowTrainer, Trainer
from training_jobs import forget_accelerator

SPECIAL = ("<pad>", "<eos>")


def rows_of(kind: str, count: int = 40) -> list[dict[str, Any]]:
    """Rows of every length up to a few words, of each kind."""
    if kind == "sft":
        return [
            {"prompt": f"{n} and {n} is", "completion": f" {2 * n}, which is even" * (1 + n % 3)} for n in range(count)
        ]
    if kind == "kto":
        return [{"prompt": f"{n} is", "completion": f" {n}" * (1 + n % 4), "label": n % 3 > 0} for n in range(count)]
    return [
        {"prompt": f"{n} is", "chosen": f" {n}" * (1 + n % 3), "rejected": " no" * (1 + n % 2)} for n in range(count)
    ]


def make_small(
    directory: Path, characters: str, *, hidden: int = 64, layers: int = 2, seed: int = 0, **more: Any
) -> None:
    """A Llama with random weights, of which each character of `characters` is a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {name: n for n, name in enumerate((*SPECIAL, *characters))}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(vocabulary), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.02,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0, **more,
            )
        )  # fmt: skip
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)


@dataclass
class Rig:
    """A model's directory and one for what is made of it."""

    model: Path
    directory: Path

    def trainer(self, kind: str, rows: Iterable[Mapping[str, Any]], **settings: Any) -> RowTrainer:
        """At step 0, by way of the files and the tokens that a run has."""
        source = self.directory / f"{kind}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given: dict[str, Any] = {
            "base_model": str(self.model), "dataset": {"path": str(source)}, "minibatch_size": 4, "device": "cpu",
        }  # fmt: skip
        section = SECTIONS[cast(Kind, kind)].model_validate(given | settings)
        tokenizer = read_tokenizer(str(self.model))
        data, _ = prepare(cast(Kind, kind), section, Files("jsonl_path", (source,)), tokenizer)
        assert isinstance(data, Dataset)
        path = self.directory / f"{kind}.safetensors"
        data.save(path)
        forget_accelerator()
        job = Job(cast(Kind, kind), section, path, str(self.model), tokenizer.pad_token_id)
        return RowTrainer(job, make_algorithm(cast(Kind, kind), section))

    def snapshot(self, trainer: Trainer, name: str) -> str:
        """Its id; its files are in `name`."""
        captured = trainer.capture({})
        assert captured is not None
        state.write(captured, self.directory / name)
        return pack(self.directory / name, self.directory / f"{name}.tar").id.hex()
