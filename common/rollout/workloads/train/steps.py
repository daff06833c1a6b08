"""Counts steps and their rows on the client, without libraries."""

from __future__ import annotations


def steps_of(rows: int, epochs: float, batch: int) -> int:
    """Return the number of steps in that many epochs; the last step may be smaller."""
    return -(-total_rows(rows, epochs) // batch)


def total_rows(rows: int, epochs: float) -> int:
    return round(rows * epochs)
