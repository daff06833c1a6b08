"""Text that others made, as a terminal may show it."""

from __future__ import annotations

import re
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Control characters, those that turn the direction of text included, as escapes such as \x1b: what a function
    raised or printed must not steer a terminal. Line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_json(line: str) -> str:
    """A line of JSON with the same value: in its texts such characters are escaped as JSON does it."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def styled(stream: TextIO) -> TextIO:
    """`stream`, which may show control characters as escapes, for those that style what they print: they give every
    text that others made to `visible` first."""
    return getattr(stream, "styled", stream)
