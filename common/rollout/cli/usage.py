"""Usage errors in the form of all other errors."""

from __future__ import annotations

import re
from typing import Any

from rollout.config.wording import choices

_INVALID = re.compile(r"Invalid value(?: for (.*?))?: ")
_NOT_WHAT = re.compile(r", unable to parse string as .*$")
_HINT = re.compile(r"[.]? (?:Did you mean (.*)\?|\(Possible options: (.*)\))$")


def describe_usage(error: Any) -> str:
    """Describe typer's usage error, and name the command whose help says what is accepted."""
    text: str = error.format_message()
    found = _INVALID.match(text)
    place = f"{found[1].replace(chr(39), '')}: " if found and found[1] else ""
    what = (text[found.end() :] if found else text).removeprefix("Value error, ").rstrip(".")
    what = _NOT_WHAT.sub("", what).replace("Input should be", "must be")
    if told := re.fullmatch(r"'(.*?)' is not one of (.*)", what):
        what = choices(told[2], told[1])
    what = re.sub(r"^Got unexpected extra arguments?(?:\(s\))? \((.*)\)$", r"too many arguments: \1", what)
    what = _HINT.sub(lambda hint: f"; did you mean {hint[1] or hint[2].replace(', ', ' or ')}?", what)
    said = f"{place}{what[:1].lower()}{what[1:]}"
    context = error.ctx
    if context is None:
        return said
    return f"{said}\n`{context.command_path} {context.help_option_names[0]}` shows what can be given"
