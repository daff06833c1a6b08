"""Types of keys in YAML files, which leave out quotes where people mean text, and write yes where they mean true."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

_WORDS = {"yes": True, "on": True, "no": False, "off": False}


class WrittenInt(int):
    """A whole number that knows how it was written."""

    source: str


class WrittenFloat(float):
    """A number that knows how it was written."""

    source: str


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.source if isinstance(value, WrittenInt | WrittenFloat) else value


def _as_flag(value: Any) -> Any:
    return _WORDS.get(value.lower(), value) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""A string, also where the file has a number or true or false without quotes."""
Flag = Annotated[bool, BeforeValidator(_as_flag)]
"""true or false; yes, no, on and off as well."""
