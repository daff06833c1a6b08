"""Text from others, made safe for a terminal."""

from __future__ import annotations

import re
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Return `text` with control characters, including those that change text direction, as escapes such as \x1b.

    What a function raised or printed must not control a terminal. Line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_json(line: str) -> str:
    """Return a line of JSON with the same value and such characters as JSON escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


def styled(stream: TextIO) -> TextIO:
    """Return `stream` without escaping, for callers that style their output and pass foreign text through `visible`
    first."""
    return getattr(stream, "styled", stream)
