"""Formats numbers of things."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """Return `1 worker`, `1,200 workers` or `2 batches`."""
    return f"{number:,} {thing}{'' if number == 1 else 'es' if thing.endswith('ch') else 's'}"


def of_unit(number: int, unit: str) -> str:
    """Return the same for a plural: `1 row` for 1 and `rows`."""
    return counted(number, unit.removesuffix("es" if unit.endswith("ches") else "s"))
