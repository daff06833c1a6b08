"""Line of each key of a TOML file, for error messages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from typing import Any, cast

Place = tuple[str | int, ...]

_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")
_AT_END = re.compile(r" \(at end of document\)$")
DEPTH_MAX = 100
"""Maximum nesting of tables and lists; readers recurse into each level."""


def parse(text: str) -> dict[str, Any]:
    """Parse TOML. Raises TOMLDecodeError also where tomllib fails otherwise: unlimited nesting and huge numbers."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError(f"Values nested more than {DEPTH_MAX} levels deep") from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from None
    level: list[Any] = [values]
    for _ in range(DEPTH_MAX):
        level = [part for one in level for part in _parts(one) if isinstance(part, dict | list)]
        if not level:
            return values
    raise tomllib.TOMLDecodeError(f"Values nested more than {DEPTH_MAX} levels deep")


def _parts(value: Any) -> Iterable[Any]:
    return cast("dict[str, Any]", value).values() if isinstance(value, dict) else value


def key_lines(text: str) -> dict[Place, int]:
    """Return the line, counted from 1, of every key and table of `text`, which must be valid TOML."""
    lines: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    prefix: Place = ()
    source = text.split("\n")
    at = 0
    while at < len(source):
        line = source[at].strip()
        if not line or line.startswith("#"):
            at += 1
            continue
        if line.startswith("["):
            path = _path(parse(line))
            prefix = _indexed(path, counts, lines, new=line.startswith("[["))
            lines.setdefault(prefix, at + 1)
            at += 1
            continue
        value, used = _statement(source, at)
        _record(value, prefix, at + 1, lines)
        at += used
    return lines


def syntax_error(error: tomllib.TOMLDecodeError, text: str) -> tuple[int, int, str]:
    """Return (line, column, fault) for a file that is not TOML."""
    message = str(error)
    if found := _POSITION.search(message):
        return int(found[1]), int(found[2]), message[: found.start()]
    if not _AT_END.search(message):
        return 1, 1, message
    last = text.rstrip("\n").split("\n")
    return len(last), len(last[-1]) + 1, _AT_END.sub("", message) + " before the file ends"


def _statement(source: list[str], at: int) -> tuple[dict[str, Any], int]:
    """Return the `key = value` at line `at`, and the number of its lines: a value may span several."""
    taken: list[str] = []
    for line in source[at:]:
        taken.append(line)
        try:
            return parse("\n".join(taken)), len(taken)
        except tomllib.TOMLDecodeError:
            continue
    return {}, len(taken)


def _path(table: dict[str, Any]) -> tuple[str, ...]:
    path: list[str] = []
    value: Any = table
    while isinstance(value, dict) and value:
        key, value = next(iter(cast(dict[str, Any], value).items()))
        path.append(key)
        if isinstance(value, list):
            value = cast(list[Any], value)[0]
    return tuple(path)


def _indexed(path: tuple[str, ...], counts: dict[Place, int], lines: dict[Place, int], *, new: bool) -> Place:
    """Return `path` with the index of the current element after each array of tables."""
    place: Place = ()
    for depth, key in enumerate(path):
        place = (*place, key)
        last = depth == len(path) - 1
        if last and new:
            counts[place] = counts.get(place, -1) + 1
        if place in counts:
            place = (*place, counts[place])
    return place


def _record(value: Any, prefix: Place, line: int, lines: dict[Place, int]) -> None:
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            lines.setdefault((*prefix, key), line)
            _record(inner, (*prefix, key), line, lines)
    elif isinstance(value, list):
        for index, inner in enumerate(cast(list[Any], value)):
            _record(inner, (*prefix, index), line, lines)
