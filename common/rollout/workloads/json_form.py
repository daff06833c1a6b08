"""The JSON that workloads read and write: canonical to hash or compare, lines to read."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NoReturn, cast

from rollout.model.errors import InvalidResultError

JsonObject = dict[str, Any]

# Encoders made once: `json.dumps` with options makes one for each call.
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
_line = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def canonical(value: Any) -> bytes:
    """Canonical JSON: equal values give equal bytes."""
    return _canonical(value).encode("utf-8", "surrogatepass")


_LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters at which common readers split lines, besides the control characters that JSON escapes anyway."""


def dump_line(value: Any) -> bytes:
    """Encode a JSONL line. Lone surrogates, which UTF-8 cannot represent, and Unicode's line ends are escaped."""
    text = _line(value)
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():
            text = text.replace(character, escape)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def dump_row(value: Any) -> bytes:
    """Encode a row with its keys in order, to hash it and read it again. Lone surrogates stay escaped."""
    return dump_line(value)[:-1]


HALF_PAIR = "the text holds half of a surrogate pair, which is no Unicode: repair the escape"


def is_unicode(value: Any) -> bool:
    """Return whether UTF-8 can represent all text in a value: an escape may be a lone surrogate."""
    try:
        _line(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def timestamp(unix_ms: int) -> str:
    """Format as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def short(value: Any) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def lookup(value: JsonObject, key: str) -> Any:
    """Return the value under a dotted key in nested objects, or None."""
    found: Any = value
    for part in key.split("."):
        found = cast(JsonObject, found).get(part) if isinstance(found, dict) else None
    return found


DEPTH_MAX = 100
"""Maximum levels of a row: it is encoded again, recursively, by programs whose stacks are fuller than the reader's."""


def parse_json(raw: bytes) -> Any:
    """Parse any JSON value that can be encoded again: UTF-8, no NaN, no number too large. Raises ValueError."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        hint = (
            "it looks like UTF-16, convert it to UTF-8" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "save it as UTF-8"
        )
        raise ValueError(f"not UTF-8 at byte {error.start} of the line: {hint}") from None
    try:
        if text.startswith("\ufeff"):
            raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
        value: Any = _decoder.decode(text)
    except json.JSONDecodeError as error:
        if unclosed := _unclosed(text, error):
            raise ValueError(f"malformed JSON: the line ends before {unclosed}") from None
        what = _WORDS.get(error.msg, error.msg)
        raise ValueError(f"malformed JSON: {what} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deeply") from None
    except _RefusedError as error:
        raise ValueError(str(error)) from None
    except ValueError:  # Python's limit, which its message explains to programmers
        raise ValueError(
            f"a number has more than {sys.get_int_max_str_digits():,} digits: write it as a string"
        ) from None
    if raw.count(b"[") + raw.count(b"{") > DEPTH_MAX and _deeper(value, DEPTH_MAX):
        raise ValueError(f"malformed JSON: nested more than {DEPTH_MAX} levels deep")
    return value


RESULT_DEPTH_MAX = 256
"""Maximum levels of a result: far below Python's own limit, so that a result is readable everywhere or nowhere."""


def parse_result(raw: bytes, *, finite: bool = True) -> Any:
    """Parse a worker's result. Raises InvalidResultError if a line of JSON cannot hold it.

    The error depends on the bytes alone. `finite` refuses NaN and infinite numbers.
    """
    try:
        # Texts of models may hold halves of surrogate pairs, which some encoders send as they are.
        value: Any = (_result_decoder if finite else _lax_decoder).decode(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as error:
        raise invalid_result(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError:
        raise invalid_result("malformed JSON") from None
    except _RefusedError as error:
        raise invalid_result(str(error)) from None
    except ValueError:
        raise invalid_result("a number has too many digits") from None
    except RecursionError:
        raise invalid_result(_TOO_DEEP) from None
    if raw.count(b"[") + raw.count(b"{") > RESULT_DEPTH_MAX and _deeper(value, RESULT_DEPTH_MAX):
        raise invalid_result(_TOO_DEEP)
    return value


def object_in(value: Any, what: str) -> JsonObject:
    """Return `value` of a result, which messages call `what`. Raises InvalidResultError if it is not an object."""
    if type(value) is not dict:
        raise invalid_result(f"{what} is no object")
    return cast(JsonObject, value)


def field_in(fields: JsonObject, name: str, *kinds: type) -> Any:
    """Return a field of a result. Raises InvalidResultError if it is missing or has another type (a bool is no int)."""
    value = fields.get(name)
    if type(value) not in kinds:
        raise invalid_result(f"{name} is missing, or no {kinds[0].__name__}")
    return value


def invalid_result(what: str) -> InvalidResultError:
    return InvalidResultError(f"the worker sent a result that cannot be used: {what}")


_TOO_DEEP = f"nested more than {RESULT_DEPTH_MAX} levels deep"


def _unclosed(text: str, error: json.JSONDecodeError) -> str:
    """Return what is still open at the end of the text, if that is the fault."""
    if error.msg.startswith("Unterminated string"):
        return _open_at("string", '"', error.colno)
    if error.pos < len(text.rstrip()):
        return ""
    opened: list[tuple[str, int]] = []
    for found in _TOKENS.finditer(text, 0, error.pos):
        if found[0] in "{[":
            opened.append((found[0], found.start() + 1))
        elif found[0] in "}]" and opened:
            opened.pop()
    if not opened:
        return ""
    kind, column = opened[-1]
    return _open_at("object", "}", column) if kind == "{" else _open_at("list", "]", column)


def _open_at(what: str, closing: str, column: int) -> str:
    return f"the {what} that begins at column {column} is closed: it was cut off, or a {closing} is missing"


def _deeper(value: Any, levels: int) -> bool:
    level: list[Any] = [value]
    for _ in range(levels):
        level = [part for one in level for part in _parts(one) if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    return cast(JsonObject, value).values() if isinstance(value, dict) else value


class _RefusedError(ValueError):
    """JSON that cannot be encoded again as it was read."""


_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')
"""Matches strings, and brackets of objects and lists outside strings."""

_WORDS = {
    "Extra data": "there is more after the value (one JSON value a line)",
    "Expecting value": "a value is missing or is no JSON (text needs double quotes; true, false, null are lower case)",
    "Expecting ',' delimiter": "a comma is missing",
    "Expecting ':' delimiter": "a colon is missing after a key",
    "Expecting property name enclosed in double quotes": "a key in double quotes is missing (or a comma is too many)",
    "Illegal trailing comma before end of object": "a comma is too many",
    "Illegal trailing comma before end of array": "a comma is too many",
    "Invalid control character at": "a line end or tab stands inside a string (write \\n, \\t),",
    "Invalid \\escape": "a backslash in a string needs another one before it,",
    "Invalid \\escape: ": "a backslash in a string needs another one before it,",
}


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _RefusedError(f"malformed JSON: the number {text[:40]} is too large")
    return number


def _no_constant(name: str) -> NoReturn:
    raise _RefusedError(f"malformed JSON: {name} is no JSON number")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> JsonObject:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _RefusedError(f"the key {short(twice)} stands twice in one object: keep one")
    return fields


_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_key_twice)
_result_decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
_lax_decoder = json.JSONDecoder()
