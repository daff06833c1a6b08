"""Keys that a file may give under other names: moved to their places before validation, and recorded for errors."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from rollout.config.locate import Place


@dataclass(slots=True)
class Renamed:
    """Values under the model's names.

    `places` maps a place in the model to the one in the file. `faults` are (place in the file, fault). `notes` are
    hints for the user.
    """

    values: dict[str, Any]
    places: dict[Place, Place] = field(default_factory=dict[Place, Place])
    faults: list[tuple[Place, str]] = field(default_factory=list[tuple[Place, str]])
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.values = deepcopy(self.values)

    def put(self, place: Place, value: Any, origin: Place) -> bool:
        """Put `value` at `place`. Returns False if a value is already there."""
        table = self.table(place[:-1])
        if table is None or place[-1] in table:
            return False
        table[place[-1]] = value
        self.places[place] = origin
        return True

    def table(self, place: Place) -> dict[Any, Any] | None:
        """Return the table at `place`, created if needed, or None if another kind of value is there."""
        table: dict[Any, Any] = self.values
        for key in place:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                return None
            table = cast("dict[Any, Any]", inner)
        return table

    def remove(self, place: Place) -> None:
        table: Any = self.values
        for key in place[:-1]:
            table = table.get(key) if isinstance(table, dict) else None  # pyright: ignore
        if isinstance(table, dict):
            cast("dict[Any, Any]", table).pop(place[-1], None)

    def in_file(self, place: Place) -> Place:
        """Return where the file gives the value at `place`."""
        for end in range(len(place), 0, -1):
            if (origin := self.places.get(place[:end])) is not None:
                return origin + place[end:]
        return place


@runtime_checkable
class Renames(Protocol):
    """Settings model whose files may use other names."""

    @classmethod
    def renamed(cls, values: dict[str, Any]) -> Renamed: ...
