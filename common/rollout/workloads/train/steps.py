"""How many steps there are, and rows in all of them: counted by the client, which needs no library for it."""

from __future__ import annotations


def steps_of(rows: int, epochs: float, batch: int) -> int:
    """Steps of so many epochs; the last may be smaller."""
    return -(-total_rows(rows, epochs) // batch)


def total_rows(rows: int, epochs: float) -> int:
    return round(rows * epochs)
