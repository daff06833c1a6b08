"""What every section of a configuration file is."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the person should know of the file that this was read from."""
        return self._notes

    def remember(self, notes: Iterable[str]) -> None:
        self._notes = tuple(notes)


def fault_at(key: str, text: str) -> PydanticCustomError:
    """For validators of a section: what is wrong is told at the place of `key`, below the section."""
    return PydanticCustomError("value_error", "{text}", {"text": text, "key": key})


def raise_faults(found: Iterable[tuple[str, str]]) -> None:
    """As `fault_at`, all of them at once: (key, what is wrong). Nothing where there is none."""
    errors = [InitErrorDetails(type=fault_at(key, text), input=None) for key, text in found]
    if errors:
        raise ValidationError.from_exception_data("", errors)
