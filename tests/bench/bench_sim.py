"""Seeds a second of the deterministic simulation."""

from __future__ import annotations

from measure import Row


def rows(quick: bool) -> list[Row]:
    return [Row("deterministic simulation", "not measured yet", "≥ 50 seeds/s a core", None)]
