"""Whether a tokenizer fits a model, from their files alone: no library is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def vocabulary_fault(model: Path, tokenizer: Path) -> str:
    """What is wrong if the tokenizer has ids that the model has no embedding for; empty: nothing that files say."""
    embeddings, vocabulary = _embeddings(model), _vocabulary(tokenizer)
    if embeddings is None or vocabulary is None or vocabulary <= embeddings:
        return ""
    return too_many_tokens(vocabulary, embeddings)


def too_many_tokens(vocabulary: int, embeddings: int) -> str:
    return (
        f"the tokenizer has {vocabulary:,} tokens and the model only {embeddings:,} embeddings: name the tokenizer "
        "that belongs to the model"
    )


def _embeddings(model: Path) -> int | None:
    config = _read(model / "config.json")
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return found if isinstance(found, int) else None


def _vocabulary(tokenizer: Path) -> int | None:
    """One more than the highest id."""
    found = _read(tokenizer / "tokenizer.json")
    vocabulary = (found.get("model") or {}).get("vocab")
    ids: list[Any] = [token.get("id") for token in found.get("added_tokens") or []]
    if isinstance(vocabulary, dict):
        ids += vocabulary.values()  # pyright: ignore[reportUnknownMemberType]
    elif isinstance(vocabulary, list):  # of a unigram model: pieces in the order of their ids
        ids.append(len(vocabulary) - 1)  # pyright: ignore[reportUnknownArgumentType]
    return max((one for one in ids if isinstance(one, int)), default=-1) + 1 or None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
