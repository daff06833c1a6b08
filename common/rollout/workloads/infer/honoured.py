"""Which keys of a row each kind of backend honours."""

from __future__ import annotations

from collections.abc import Iterable

FORWARDS = frozenset({"openai"})
"""Kinds that send an OpenAI body on as it is written: their server judges its keys."""

LATER = frozenset(
    {
        "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "include_stop_str_in_output",
        "skip_special_tokens", "regex", "choice", "grammar",
    }
)  # fmt: skip
"""Sampling keys that not every backend knows. They are part of a row's identity only where they are set."""

_HONOURED = {
    "mock": LATER - {"regex", "grammar"},  # it writes no text to order; what needs a model's tokens it ignores
    "openai": LATER,  # the server judges
    "transformers": LATER - {"bad_words"},
    "vllm": LATER,
}


def not_honoured(kind: str, keys: Iterable[str]) -> list[str]:
    """Those of the sampling `keys` that the backend cannot do."""
    return sorted(LATER.intersection(keys) - _HONOURED.get(kind, frozenset()))
