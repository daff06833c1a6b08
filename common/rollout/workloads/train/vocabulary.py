"""Checks from files alone whether a tokenizer fits a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast


def vocabulary_fault(model: Path, tokenizer: Path) -> str:
    """Return a fault if the tokenizer has ids without an embedding in the model, else ""."""
    embeddings, vocabulary = _embeddings(model), _vocabulary(tokenizer)
    if embeddings is None or vocabulary is None or vocabulary <= embeddings:
        return ""
    return too_many_tokens(vocabulary, embeddings)


def too_many_tokens(vocabulary: int, embeddings: int) -> str:
    return (
        f"the tokenizer has {vocabulary:,} tokens and the model only {embeddings:,} embeddings: name the tokenizer "
        "that belongs to the model"
    )


def same_tokens(one: Path, other: Path) -> bool:
    """Return whether two tokenizers produce the same ids, as far as their files show."""
    first, second = (_read(place / "tokenizer.json") for place in (one, other))
    if not first or not second:
        return True
    return all(_table(first.get("model")).get(key) == _table(second.get("model")).get(key) for key in _MODEL) and (
        _added(first) == _added(second)
    )


_MODEL = ("type", "vocab", "merges")


def _added(tokenizer: dict[str, Any]) -> dict[Any, Any]:
    added: list[Any] = tokenizer.get("added_tokens") or []
    return {_table(token).get("id"): _table(token).get("content") for token in added}


def _embeddings(model: Path) -> int | None:
    config = _read(model / "config.json")
    found: Any = config.get("vocab_size") or _table(config.get("text_config")).get("vocab_size")
    return found if isinstance(found, int) else None


def _vocabulary(tokenizer: Path) -> int | None:
    """Return one more than the highest id."""
    found = _read(tokenizer / "tokenizer.json")
    vocabulary: Any = _table(found.get("model")).get("vocab")
    added: list[Any] = found.get("added_tokens") or []
    ids: list[Any] = [_table(token).get("id") for token in added]
    if isinstance(vocabulary, dict):
        ids += cast("dict[str, Any]", vocabulary).values()
    elif isinstance(vocabulary, list):  # of a unigram model: pieces in the order of their ids
        ids.append(len(cast("list[Any]", vocabulary)) - 1)
    return max((one for one in ids if isinstance(one, int)), default=-1) + 1 or None


def _read(path: Path) -> dict[str, Any]:
    try:
        return _table(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
