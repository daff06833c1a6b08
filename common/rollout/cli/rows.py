"""Rows as a person types them: counted from 1, children behind their parents, as in `43.2`."""

from __future__ import annotations

from rollout.model.errors import ConfigError

_DIGITS_MAX = 18


def place_of(text: str) -> list[int]:
    """Seqs, counted from 0. ConfigError."""
    parts = text.strip().split(".")
    if not all(part.isascii() and part.isdecimal() and len(part) <= _DIGITS_MAX and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{text!r} is no row: rows are counted from 1, and a child is written behind its parent, as in 43 or 43.2"
        )
    return [int(part) - 1 for part in parts]
