"""The models of a training run: the policy, perhaps with an adapter or a score head, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rollout.model.errors import AttemptError
from rollout.workloads.train.config import LoraSection, TrainingSection
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import cached_file

from rollout_worker.algorithms.port import Batch
from rollout_worker.algorithms.rm import last_token


class ScoreModel(nn.Module):
    """A decoder with a linear head: (sequences,) scores at the last token of each."""

    def __init__(self, backbone: nn.Module, hidden: int) -> None:
        super().__init__()
        self.model = backbone
        self.score = nn.Linear(hidden, 1, bias=False)
        self.config = backbone.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
        return last_token(self.score(hidden).squeeze(-1), attention_mask)

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.model.gradient_checkpointing_enable(**options)


def load_model(directory: str, settings: TrainingSection, head: str) -> nn.Module:
    """A model in float32 from a directory or a Hugging Face name. AttemptError says what is wrong with it."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": settings.attention}
    if settings.base_model.revision:
        options["revision"] = settings.base_model.revision
    try:
        config: Any = AutoConfig.from_pretrained(directory, revision=settings.base_model.revision or "main")
        if settings.disable_dropout:
            without_dropout(config)
        if head == "language_model":
            model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, config=config, **options)
        else:
            model = ScoreModel(AutoModel.from_pretrained(directory, config=config, **options), config.hidden_size)
            nn.init.normal_(model.score.weight, std=config.hidden_size**-0.5)
    except (OSError, ValueError) as error:
        raise AttemptError(f"the model cannot be loaded: {error}", code="model_invalid", retry=False) from error
    if settings.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def without_dropout(config: Any) -> None:
    for name, value in list(config.to_dict().items()):
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)


def with_adapter(model: nn.Module, lora: LoraSection, head: str) -> Any:
    """The model with a trainable adapter, and everything else frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        modules_to_save=["score"] if head == "score" else None,
        task_type=None if head == "score" else "CAUSAL_LM",
    )
    try:
        return get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        message = f"lora.target_modules: {error}"
        raise AttemptError(message, code="bad_run_config", retry=False) from error


class StepModels:
    """`Models` of the algorithms: `policy` as it is trained, and the reference beside it.

    `reference` None: the policy without its adapter where there is one (`adapter_off`), else nothing.
    """

    def __init__(
        self,
        policy: Any,
        reference: nn.Module | None,
        *,
        adapter_off: bool = False,
        unwrap: Callable[[Any], Any] = lambda model: model,
        autocast: Callable[[], Any] = nullcontext,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._adapter_off = adapter_off
        self._unwrap = unwrap
        self._autocast = autocast

    def policy(self, batch: Batch) -> Tensor:
        return _logits(self._policy, batch)

    def reference(self, batch: Batch) -> Tensor | None:
        with torch.no_grad(), self._autocast():
            if self._reference is not None:
                return _logits(self._reference, batch)
            if not self._adapter_off:
                return None
            model = self._unwrap(self._policy)
            training = model.training
            model.eval()  # a reference has no dropout
            try:
                with model.disable_adapter():
                    return _logits(model, batch)
            finally:
                model.train(training)


def _logits(model: Any, batch: Batch) -> Tensor:
    options: dict[str, Any] = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    found = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, **options)
    return found if isinstance(found, Tensor) else found.logits


def parameters(model: nn.Module) -> tuple[int, int]:
    """(all, those that are trained)."""
    every = list(model.parameters())
    return sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad)


_KEPT = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
_KEPT_MAX = 64 << 20


def model_files(name: str, revision: str | None) -> dict[str, bytes]:
    """What beside the weights is in a model's directory, by file name: configuration, tokenizer, templates."""
    directory = Path(name)
    if not directory.is_dir():
        found: Any = cached_file(name, "config.json", revision=revision)
        directory = Path(found).parent
    paths = sorted({path for pattern in _KEPT for path in directory.glob(pattern) if path.is_file()})
    named = {path.name: path for path in paths if not path.name.endswith(".index.json")}
    size = sum(path.stat().st_size for path in named.values())
    if size > _KEPT_MAX:
        raise AttemptError(
            f"the model's files beside its weights have {size >> 20} MiB, {_KEPT_MAX >> 20} at most go into a snapshot",
            code="model_invalid",
            retry=False,
        )
    return {file: path.read_bytes() for file, path in named.items()}
