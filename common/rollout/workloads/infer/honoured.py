"""Which keys of a row each kind of backend honours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FORWARDS = frozenset({"openai"})
"""Kinds that forward an OpenAI body unchanged; their server judges its keys."""

LATER = frozenset(
    {
        "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "include_stop_str_in_output",
        "skip_special_tokens", "regex", "choice", "grammar",
    }
)  # fmt: skip
"""Sampling keys that not every backend supports. They are part of a row's identity only if they are set."""

_HONOURED = {
    "mock": LATER - {"regex", "grammar"},  # it writes no text to order; what needs a model's tokens it ignores
    "openai": LATER,  # the server judges
    "transformers": LATER - {"bad_words"},
    "vllm": LATER,
}


EMBEDS = frozenset({"mock", "transformers", "vllm"})
"""Kinds that embed. An engine of vLLM either embeds or generates text."""
TOOLS = frozenset({"mock", "transformers", "vllm"})
"""Kinds whose chats support tools."""
ADAPTS = frozenset({"mock", "transformers", "vllm"})
"""Kinds that support LoRA adapters."""
IMAGES = frozenset({"mock", "openai", "transformers", "vllm"})
"""Kinds whose chats support images if the model does."""
POOLS = frozenset({"mock", "transformers"})
"""Kinds that let a row choose its pooling."""


def wrong_engine(kind: str, engine: Mapping[str, Any], *, embeds: bool) -> str:
    """Return why this engine cannot embed (or generate text), or "" if it can. `engine` has its options."""
    if kind != "vllm":
        return ""
    pools = engine.get("runner") == "pooling"
    if pools == embeds:
        return ""
    want, other, set_it = ("embeddings", "texts", "set") if embeds else ("texts", "embeddings", "remove")
    return (
        f'this engine of backend "vllm" is for {other}, and the row wants {want}: {set_it} engine = '
        '{ runner = "pooling" } in section [backend]; a run has one engine, so rows for the other go into another run'
    )


def not_honoured(kind: str, keys: Iterable[str]) -> list[str]:
    """Return the sampling `keys` that the backend does not support."""
    return sorted(LATER.intersection(keys) - _HONOURED.get(kind, frozenset()))
