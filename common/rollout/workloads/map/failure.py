"""How an exception of a user's function is encoded in a failure's single text, and decoded into its parts."""

from __future__ import annotations

from dataclasses import dataclass

_TRACEBACK = "\n\nTraceback, from the function on:\n"


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no result. `traceback` has the user's frames only and may be empty."""

    code: str
    type: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def to_text(type: str, message: str, traceback: str) -> str:
    text = f"{type}: {message}"
    return f"{text}{_TRACEBACK}{traceback}" if traceback else text


def from_text(code: str, text: str) -> RowError:
    """Decode a failure. Failures that the engine made have no exception type; their code takes its place."""
    head, _, traceback = text.partition(_TRACEBACK)
    kind, colon, message = head.partition(": ")
    if colon and all(part.isidentifier() for part in kind.replace("<locals>", "locals").split(".")):
        return RowError(code, kind, message, traceback)
    return RowError(code, code, head, traceback)
