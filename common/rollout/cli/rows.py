"""Row numbers as users write them: counted from 1, a child after its parent, as in `43.2`."""

from __future__ import annotations

from rollout.model.errors import ConfigError

_DIGITS_MAX = 18


def place_of(text: str) -> list[int]:
    """Parse a row number into seqs, counted from 0. Raises ConfigError."""
    parts = text.strip().split(".")
    if not all(part.isascii() and part.isdecimal() and len(part) <= _DIGITS_MAX and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{text!r} is no row: rows are counted from 1, and a child is written behind its parent, as in 43 or 43.2"
        )
    return [int(part) - 1 for part in parts]
