"""The models of a training run: the policy, possibly with an adapter or a score head, and its reference."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from rollout.model.errors import AttemptError
from rollout.workloads.train.base_config import LoraSection
from rollout.workloads.train.config import TrainingSection
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import hub

from rollout_worker.algorithms.port import Batch
from rollout_worker.algorithms.rm import last_token
from rollout_worker.backends.training.model_files import base_of_adapter
from rollout_worker.backends.training.packing import packed_masks


class ScoreModel(nn.Module):
    """A decoder with a linear head. Returns (sequences,) scores at the last token of each."""

    def __init__(self, backbone: Any, hidden: int) -> None:
        super().__init__()
        self.model = backbone
        self.score = nn.Linear(hidden, 1, bias=False)
        self.config: Any = backbone.config
        self._no_split_modules: Any = backbone._no_split_modules  # what FSDP gathers at a time

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state
        return last_token(self.score(hidden).squeeze(-1), attention_mask)

    def get_input_embeddings(self) -> nn.Module:
        backbone: Any = self.model
        return backbone.get_input_embeddings()


def load_model(name: str, settings: TrainingSection, head: str, revision: str | None = None) -> nn.Module:
    """Load a model in float32 from a directory or a Hugging Face name; a directory with an adapter gives its base with
    the adapter merged. `head` is language_model, score (new if the files have none) or reward (which the files must
    have). Raises AttemptError with the fault."""
    try:
        model = _loaded(name, settings, head, revision)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if isinstance(error, ImportError) and "flash" not in str(error).lower():
            raise
        why = _refuses_attention(error, settings.attention) or f"the model cannot be loaded: {error}"
        raise AttemptError(why, code="model_invalid", retry=False) from error
    if settings.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def _refuses_attention(error: Exception, attention: str) -> str:
    """Return the message if the model does not support this attention, or "" for another error."""
    said = str(error).lower()
    if attention == "eager" or ("attention implementation" not in said and "flash" not in said):
        return ""
    others = '"eager"' if attention == "sdpa" else '"sdpa" or "eager"'
    first = str(error).partition(". ")[0].rstrip(".")
    return f'the model cannot be loaded with attention = "{attention}" ({first}): set attention = {others}'


def detach_from_files(model: nn.Module) -> None:
    """Copy weights to private memory. As loaded, they are pages of their file: a change of the file would change
    weights that no step has touched, such as those below an adapter."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()


def _loaded(name: str, settings: TrainingSection, head: str, revision: str | None) -> nn.Module:
    if (base := base_of_adapter(Path(name))) is None:
        return _load(name, settings, head, revision)
    # A new adapter, and a reference, begin where this one ended.
    return merge_adapter(_loaded(base, settings, head, None), name).requires_grad_(True)


def merge_adapter(model: Any, adapter: str) -> Any:
    """Return the model with the adapter in the directory `adapter` merged into it.

    If the adapter changes the embeddings or the output layer, and they are tied, they get separate weights: otherwise
    each would receive the other's change.
    """
    if is_tied(model) and any(part in key for key in _adapted(Path(adapter)) for part in _ends(model)):
        output: Any = model.get_output_embeddings()
        output.weight = nn.Parameter(output.weight.detach().clone())
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    given: Any = importlib.import_module("peft").PeftModel
    with _without_warnings():
        return given.from_pretrained(model, adapter).merge_and_unload()


def is_tied(model: Any) -> bool:
    """Return whether embeddings and output layer are one tensor."""
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return output is not None and output.weight is model.get_input_embeddings().weight


def _adapted(adapter: Path) -> list[str]:
    """Return the names of an adapter's tensors."""
    opened: Any = safe_open(adapter / "adapter_model.safetensors", framework="pt")
    with opened as file:
        return list(file.keys())


def _ends(model: Any) -> list[str]:
    """Return the names that an adapter's tensors on the embeddings and the output layer have."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    named = [name for name, module in model.named_modules() if any(module is layer for layer in layers)]
    return [f".{name}.lora_" for name in named]


def _load(name: str, settings: TrainingSection, head: str, revision: str | None) -> nn.Module:
    given: Any = AutoConfig
    config = given.from_pretrained(name, revision=revision or "main")
    if settings.disable_dropout:
        without_dropout(config)
    kind: Any = AutoModelForCausalLM if head == "language_model" else AutoModel
    model, found = kind.from_pretrained(
        name,
        config=config,
        revision=revision or "main",
        dtype=torch.float32,
        attn_implementation=settings.attention,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"its files lack the weights {', '.join(missing[:3])}{more}")
    if head == "language_model":
        return model
    width = int(config.get_text_config().hidden_size)
    scored = ScoreModel(model, width)
    with torch.no_grad():
        if (known := _score_head(name, width, revision)) is not None:
            scored.score.weight.copy_(known)
        elif head == "reward":
            raise ValueError(f"its files lack a score.weight of 1 x {width:,}: it is no reward model")
        else:
            nn.init.normal_(scored.score.weight, std=width**-0.5)
    return scored


def _score_head(name: str, hidden: int, revision: str | None) -> Tensor | None:
    """Return the head of a reward model whose other files are already loaded."""
    given: Any = hub
    config = Path(given.cached_file(name, "config.json", revision=revision or "main"))
    for path in sorted(config.parent.glob("model*.safetensors")):
        opened: Any = safe_open(path, framework="pt")
        with opened as file:
            if "score.weight" in file.keys():  # noqa: SIM118 - it is no mapping
                found = cast(Tensor, file.get_tensor("score.weight"))
                return found.float() if found.shape == (1, hidden) else None
    return None


def without_dropout(config: Any) -> None:
    for one in {id(one): one for one in (config, config.get_text_config())}.values():
        for name, value in list(one.to_dict().items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(one, name, 0.0)


def checkpoint_activations(model: Any) -> None:
    """Enable gradient checkpointing. Raises AttemptError if the model does not support it."""
    decoder = model.model if isinstance(model, ScoreModel) else model
    how = {"use_reentrant": False}
    try:
        if hasattr(decoder, "activation_checkpointing_enable"):  # the newer name
            decoder.activation_checkpointing_enable(how)
        else:
            decoder.gradient_checkpointing_enable(how)
    except ValueError as error:
        message = f"gradient_checkpointing: {error}: remove it"
        raise AttemptError(message, code="bad_run_config", retry=False) from error


def with_adapter(model: nn.Module, lora: LoraSection, head: str) -> Any:
    """Return the model with a trainable adapter, and everything else frozen."""
    from peft import LoraConfig, get_peft_model

    kind: Any = LoraConfig
    config = kind(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_linear(model) if lora.target_modules == "all-linear" else lora.target_modules,
        modules_to_save=["score"] if head == "score" else None,
        task_type=None if head == "score" else "CAUSAL_LM",
    )
    wrap: Any = get_peft_model
    try:
        with _without_warnings():
            return wrap(model, config)
    except ValueError as error:
        message = f"lora.target_modules: {error}"
        raise AttemptError(message, code="bad_run_config", retry=False) from error


@contextmanager
def _without_warnings() -> Generator[None]:
    """Suppress warnings: peft uses old names of transformers, and warns of adapters on tied weights, which
    `merge_adapter` unties."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*tie_word_embeddings", UserWarning)
        yield


def _linear(model: nn.Module) -> list[str]:
    """Return all linear layers except the last, by suffixes of their names. (peft's all-linear needs a transformers
    model.)"""
    ends: set[str] = set()
    for name, module in model.named_modules():  # pyright: ignore[reportUnknownVariableType]
        if isinstance(module, nn.Linear):
            ends.add(str(name).rpartition(".")[2])  # pyright: ignore[reportUnknownArgumentType]
    return sorted(ends - {"lm_head", "embed_out", "score"})


def adapter_file(model: Any, base: str, head: str) -> bytes:
    """Return adapter_config.json of a model with an adapter. `base` is the base model as the user named it."""
    found: dict[str, Any] = model.peft_config["default"].to_dict()
    found |= {"base_model_name_or_path": base, "inference_mode": True}
    if head == "score":
        found["task_type"] = "SEQ_CLS"
    plain: dict[str, Any] = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return json.dumps(plain, sort_keys=True, indent=1, default=str).encode()


class StepModels:
    """`Models` of the algorithms: the trained `policy`, and the reference.

    If `reference` is None, it is the policy without its adapter (`adapter_off`) if there is one, else nothing. `plain`
    is the policy without accelerate's wrappers.
    """

    def __init__(
        self,
        policy: Any,
        reference: nn.Module | None,
        *,
        adapter_off: bool = False,
        plain: Any = None,
        autocast: Callable[[], Any] = nullcontext,
    ) -> None:
        self._policy = policy
        self._reference = reference
        self._adapter_off = adapter_off
        self._plain = plain
        self._autocast = autocast

    def policy(self, batch: Batch) -> Tensor:
        return _logits(self._policy, batch)

    def outputs(self, batch: Batch) -> Any:
        """Return all outputs of the trained module, if it has more than logits."""
        return _outputs(self._policy, batch)

    def reference(self, batch: Batch) -> Tensor | None:
        with torch.no_grad(), self._autocast():
            if self._reference is not None:
                return _logits(self._reference, batch)
            if not self._adapter_off:
                return None
            model = self._plain
            training = model.training
            model.eval()  # a reference has no dropout
            try:
                with model.disable_adapter():
                    return _logits(model, batch)
            finally:
                model.train(training)


def _logits(model: Any, batch: Batch) -> Tensor:
    found = _outputs(model, batch)
    return found if isinstance(found, Tensor) else found.logits


def _outputs(model: Any, batch: Batch) -> Any:
    mask, options = batch.attention_mask, dict[str, Any]()
    if batch.position_ids is not None:
        mask = packed_masks(getattr(model, "module", model).config, batch.position_ids)
        options = {"position_ids": batch.position_ids}
    return model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False, **options)


def parameters(model: nn.Module) -> tuple[int, int]:
    """Return (all parameters, trained parameters)."""
    every = list(model.parameters())
    return sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad)
