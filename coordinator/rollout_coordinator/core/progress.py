"""What a log remembers beside its counts: for policies, limits, hand-overs, and its working time.

It is in the log's row as JSON, so a new leader knows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_AS_IT_IS = ("busy_ms", "sealed_count", "kept", "left", "holds", "append", "origin")


@dataclass(slots=True)
class Used:
    """Counts of the policy `skip_rest`.

    `bad` and `good` are items with a result, by whether they failed with one of its codes; `again` are items to be
    retried that last failed so. `why` is the reason for skipping what has not begun.
    """

    why: str = ""
    units_in: int = 0
    units_out: int = 0
    bad: int = 0
    good: int = 0
    again: int = 0
    ran_ms: int = 0
    codes: dict[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, Any]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


@dataclass(slots=True)
class Progress:
    """`sealed_count`: items when the log was sealed, where policies may append more. `tally`: items that failed and
    that are done, for `stop_early`. `kept`: (seq, ms) of results that name objects; `left`: of failures that do.
    `handed_over`: by seq, the attempt that gave the item back and what it left. `holds`: parents that keep objects for
    their children. `append`: (first seq, generation) of the copies to make; `origin`: of those that were made."""

    busy_ms: int = 0
    sealed_count: int = 0
    tally: list[int] = field(default_factory=lambda: [0, 0])
    kept: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    left: list[int] = field(default_factory=list[int])
    handed_over: dict[int, tuple[int, bytes]] = field(default_factory=dict[int, tuple[int, bytes]])
    holds: list[int] = field(default_factory=list[int])
    append: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    origin: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    rest: Used = field(default_factory=Used)

    def to_json(self) -> str:
        said: dict[str, Any] = {name: value for name in _AS_IT_IS if (value := getattr(self, name))}
        if self.tally != [0, 0]:
            said["tally"] = self.tally
        if self.handed_over:
            said["handed_over"] = {seq: (attempt, data.hex()) for seq, (attempt, data) in self.handed_over.items()}
        if rest := self.rest.to_json():
            said["rest"] = rest
        return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=False) if said else "{}"

    @classmethod
    def from_json(cls, text: str) -> Progress:
        if text in ("", "{}"):
            return cls()
        said: dict[str, Any] = json.loads(text)
        return cls(
            said.get("busy_ms", 0),
            said.get("sealed_count", 0),
            said.get("tally", [0, 0]),
            [(seq, at_ms) for seq, at_ms in said.get("kept", [])],
            said.get("left", []),
            {int(seq): (attempt, bytes.fromhex(data)) for seq, (attempt, data) in said.get("handed_over", {}).items()},
            said.get("holds", []),
            [(first, generation) for first, generation in said.get("append", [])],
            {int(seq): (first, generation) for seq, (first, generation) in said.get("origin", {}).items()},
            Used(**said.get("rest", {})),
        )
