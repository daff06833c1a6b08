"""What a row of the table of safeguards is."""

from __future__ import annotations

from dataclasses import dataclass

from removal import Edit

CORE = "rollout_coordinator.core."
COORDINATOR = "rollout_coordinator."
WORKER = "rollout_worker."


@dataclass(frozen=True, slots=True)
class Safeguard:
    """`tests` (below tests/) each fail without it, the cheapest first; with `simulated` the simulation notices too.

    `slow`: its tests start databases or processes, so the bounded run leaves it to the long one.
    `covered_by`: another safeguard that alone keeps the same harm away. Then nothing notices when this one is removed,
    and `tests` fail when both are.
    """

    name: str
    protects: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()
    simulated: bool = False
    covered_by: str = ""
    slow: bool = False

    @property
    def where(self) -> str:
        return ", ".join(dict.fromkeys(edit.where for edit in self.edits))


def cut(where: str, old: str, new: str) -> tuple[Edit, ...]:
    """A removal of one edit."""
    return (Edit(where, old, new),)


def never(where: str, condition: str) -> tuple[Edit, ...]:
    """A removal of a check: what stands between `if` and `:` is never true."""
    return (Edit(where, f"if {condition}:", "if False:"),)
