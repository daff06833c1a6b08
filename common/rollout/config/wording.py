"""pydantic's errors in words for the author of the file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, cast

_KINDS = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a table",
    "is_instance_of": "of another type",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_SENSITIVE = re.compile(r"(^|[._])(url|token|secret|password|key)$", re.IGNORECASE)


_SECTION = ("model_type", "model_attributes_type")


def describe(error: Mapping[str, Any], name: str, table: str = "a table, such as [section]") -> str:
    """Return one entry of `ValidationError.errors()` as a sentence.

    `name` is the key's, so that messages show no secrets. `table` is what a section is called in the file's format.
    """
    kind = str(error["type"])
    context = cast(dict[str, Any], error.get("ctx") or {})
    shown = _shown(error.get("input"), name)
    if kind == "missing":
        return "is missing: add it"
    if kind in _SECTION:
        return f"must be {table}, not {shown}"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {shown}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        bound = context[key]
        return f"must be {words} {int(bound) if bound == int(bound) else bound}, not {shown}"
    if kind == "literal_error":
        return choices(str(context.get("expected", "")), error.get("input"), shown)
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind in ("string_too_long", "too_long"):
        return f"is too long: at most {context.get('max_length')}"
    if kind == "string_pattern_mismatch":
        return f"must match {context.get('pattern')}, not {shown}"
    if kind in ("value_error", "assertion_error"):
        return re.sub(r"^(Value|Assertion) error, ", "", str(error["msg"]))
    message = str(error["msg"]).replace("Input should be", "must be")
    return message[0].lower() + message[1:]


def choices(expected: str, value: Any, shown: str = "") -> str:
    """Return what `value` must be, where `expected` lists choices in single quotes, and which one was probably
    meant."""
    known = re.findall(r"'([^']*)'", expected)
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.6)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    *others, last = [f'"{one}"' for one in known] or [expected.lower()]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"must be {listed}, not {shown or _shown(value, '')}{hint}"


def _shown(value: Any, name: str) -> str:
    if _SENSITIVE.search(name):
        return _type(value)
    if isinstance(value, str):
        return f'"{value[:80]}"' + ("..." if len(value) > 80 else "")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        text = str(value)
        return text[:80] + ("..." if len(text) > 80 else "")
    return _type(value)


def _type(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return "a string" if isinstance(value, str) else f"a {type(value).__name__}"
