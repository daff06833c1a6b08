"""Models with random weights, a byte-level tokenizer and a chat template: real engines, offline, in seconds."""

# The engine's own types are incomplete or, where it is not installed, absent.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.model.errors import ConfigError

PAD, EOS, START, END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_LENGTH = 2048
_LEARNED = 512
"""Number of tokens that the tokenizer uses. In a larger vocabulary the others have names, so that a model can emit
them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the tokenizer's merges are learned from: prose, numbers, JSON and code, so that none of them is all bytes.
_TEXT = [
    "The coordinator hands work to the workers and the workers hand results back to the coordinator.",
    "A worker that is lost gives its work to another worker, and nothing is done twice.",
    "When the lease ends, another coordinator takes it and the epoch grows by one.",
    "Please write a short answer to the question. Think about it step by step and then answer with a number.",
    "What is the sum of 12 and 30? The sum of 12 and 30 is 42. What is 7 times 8? It is 56.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 30 40 50 60 70 80 90 100 1000 2024 2025 2026",
    '{"name": "value", "count": 3, "items": [1, 2, 3], "done": true, "error": null, "text": "some text"}',
    "def add(first, second):\n    return first + second\n\nfor item in items:\n    print(item)\n",
    "Translate to French: Hello. Summarize this text in one sentence. List three colours: red, green, blue.",
    "user\nassistant\nsystem\nYou are a helpful assistant.",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama. `std` is that of the normal distribution of its weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    std: float
    dtype: str

    @property
    def parameters(self) -> int:
        """Number of parameters, including embeddings and norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)


TINY = Shape(
    layers=2,
    hidden=128,
    intermediate=256,
    heads=2,
    kv_heads=2,
    head_dim=64,
    vocabulary=_LEARNED,
    tied=False,
    # Larger than usual, so that the most probable token stands out from its neighbours and greedy is stable.
    std=0.2,
    dtype="float32",
)


def make_tiny(directory: Path, seed: int = 0) -> None:
    """Write a 2-layer, 128-wide Llama (some 0.5 M parameters) that transformers and vLLM load. See make_random."""
    make_random(directory, TINY, seed)


def make_random(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Write a Llama of this shape that transformers and vLLM load.

    The same seed and library versions give the same bytes. Raises ConfigError if torch or transformers are missing, or
    if the directory holds something else.
    """
    try:
        import torch
        from safetensors.torch import save_file
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"making a model needs torch and transformers ({error}): pip install 'rollout-engine[transformers]'"
        ) from error
    if directory.exists() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} exists and holds something else than a model: name another directory")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(shape.vocabulary)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {name: int(tokenizer.token_to_id(name)) for name in (PAD, EOS, START, END)}
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=shape.std,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [ids[EOS], ids[END]]
    model.generation_config.pad_token_id = ids[PAD]
    weights = {name: tensor.contiguous() for name, tensor in model.to(getattr(torch, shape.dtype)).state_dict().items()}
    if shape.tied:
        del weights["lm_head.weight"]  # the embeddings, under a second name
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(str(directory))
    model.generation_config.save_pretrained(str(directory))
    for name in ("config.json", "generation_config.json"):
        # The version is part of the bytes, hence of the model's content id and of every row's seed.
        saved = json.loads((directory / name).read_text("utf-8"))
        saved.pop("transformers_version", None)
        if name == "config.json" and shape.dtype != "float32":
            saved["torch_dtype"] = shape.dtype
        _write(directory / name, saved)
    _write(directory / "tokenizer_config.json", _tokenizer_config())


def make_tokenizer(size: int = _LEARNED) -> Any:
    """Return a byte-level BPE with that many tokens, of the `tokenizers` library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=_LEARNED,
        special_tokens=[PAD, EOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    missing = size - tokenizer.get_vocab_size()
    if missing <= 0:
        return tokenizer
    whole = json.loads(tokenizer.to_str())
    vocabulary: dict[str, int] = whole["model"]["vocab"]
    vocabulary.update({f"Ġ<{n}>": n for n in range(size - missing, size)})  # no merge leads to them
    return Tokenizer.from_str(json.dumps(whole))


def _tokenizer_config() -> dict[str, Any]:
    # By hand: what save_pretrained writes differs between versions, and older ones cannot read the newer form.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START, END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
