"""Base of every section of a configuration file."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """Hints for the user about the file that this was read from."""
        return self._notes

    def remember(self, notes: Iterable[str]) -> None:
        self._notes = tuple(notes)


def fault_at(key: str, text: str) -> PydanticCustomError:
    """Return an error of a section's validator that is reported at `key` below the section."""
    return PydanticCustomError("value_error", "{text}", {"text": text, "key": key})


def raise_faults(found: Iterable[tuple[str, str]]) -> None:
    """Raise all faults (key, text) at once, as `fault_at`; do nothing if there are none."""
    errors = [InitErrorDetails(type=fault_at(key, text), input=None) for key, text in found]
    if errors:
        raise ValidationError.from_exception_data("", errors)
