"""Text that others made, as a terminal may show it."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""Control characters, those that turn the direction of text included, as escapes such as \x1b: what a function
    raised or printed must not steer a terminal. Line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
