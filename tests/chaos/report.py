"""What a campaign on one database did and found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Struck:
    """One fault, and what came of it. Seconds; `at` is Unix time."""

    number: int
    kind: str
    target: str = ""
    in_flight: int = 0
    effect: str = ""
    at: float = 0.0
    held_s: float = 0.0
    first_commit_s: float = 0.0
    settled_s: float = 0.0
    overlaps: bool = False
    counted: bool = False
    blames: str | None = None


@dataclass
class Report:
    """What a campaign on one database found."""

    database: str
    seed: int
    seconds: float = 0.0
    faults: list[Struck] = field(default_factory=list[Struck])
    totals: dict[str, Any] = field(default_factory=dict[str, Any])
    objections: list[str] = field(default_factory=list[str])
    directory: str = ""
