"""Types of keys in YAML files, whose authors omit quotes around text and write yes for true."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

_WORDS = {"yes": True, "on": True, "no": False, "off": False}


class WrittenInt(int):
    """Whole number that keeps its source text."""

    source: str


class WrittenFloat(float):
    """Number that keeps its source text."""

    source: str


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.source if isinstance(value, WrittenInt | WrittenFloat) else value


def _as_flag(value: Any) -> Any:
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""String; the file may have a number, true or false without quotes."""
Flag = Annotated[bool, BeforeValidator(_as_flag)]
"""true or false; yes, no, on and off are accepted too."""
