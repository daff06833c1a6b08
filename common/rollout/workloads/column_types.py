"""Infers the column types that JSON values need, value by value, so that files of any length are read line by line.

A type is one of the words of `Simple`, a `ListOf`, or an `ObjectOf`. Values without a common type become json: text
with the JSON of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, cast

Simple = Literal["null", "bool", "int", "long", "float", "text", "words", "json"]
"""int: whole numbers that a float represents too; long: others of 64 bits; words: text and whole numbers, as text."""

_INT, _LONG = 1 << 53, 1 << 63
_DEPTH, _KEYS = 32, 1000
"""Maximum levels of a type, and keys of an object."""


@dataclass(frozen=True, slots=True)
class ListOf:
    inner: Type


@dataclass(frozen=True, slots=True)
class ObjectOf:
    """The keys, in the order in which they were seen."""

    fields: Mapping[str, Type]


Type = Simple | ListOf | ObjectOf


def type_of(value: Any, depth: int = 0) -> Type:
    """Return the type of a JSON value."""
    match value:
        case None:
            return "null"
        case bool():
            return "bool"
        case int():
            return "int" if -_INT <= value <= _INT else "long" if -_LONG <= value < _LONG else "json"
        case float():
            return "float"
        case str():
            return "text"
        case _ if depth >= _DEPTH:
            return "json"
        case list():
            items = cast("list[Any]", value)
            if items and set(map(type, items)) == {float}:
                return ListOf("float")  # an embedding, perhaps
            return ListOf(reduce(merged, (type_of(item, depth + 1) for item in items), cast(Type, "null")))
        case _:
            fields = cast("dict[str, Any]", value)
            if len(fields) > _KEYS:
                return "json"
            return ObjectOf({key: type_of(inner, depth + 1) for key, inner in fields.items()})


def merged(one: Type, other: Type) -> Type:
    """Return the type that holds the values of both."""
    if "null" in (one, other):
        return other if one == "null" else one
    if isinstance(one, ListOf) and isinstance(other, ListOf):
        return ListOf(merged(one.inner, other.inner))
    if isinstance(one, ObjectOf) and isinstance(other, ObjectOf):
        fields = dict(one.fields)
        for key, inner in other.fields.items():
            fields[key] = merged(fields[key], inner) if key in fields else inner
        return ObjectOf(fields) if len(fields) <= _KEYS else "json"
    if isinstance(one, str) and isinstance(other, str):
        if one == other:
            return one
        both = frozenset((one, other))
        for kinds, joined in _JOINED:
            if both <= kinds:
                return joined
    return "json"


_JOINED: tuple[tuple[frozenset[Simple], Simple], ...] = (
    (frozenset({"int", "long"}), "long"),
    (frozenset({"int", "float"}), "float"),
    (frozenset({"text", "words", "int", "long"}), "words"),
)


def is_exact(kind: Type) -> bool:
    """Return whether its values go into a column unchanged."""
    if isinstance(kind, ListOf):
        return is_exact(kind.inner)
    if isinstance(kind, ObjectOf):
        return bool(kind.fields) and all(map(is_exact, kind.fields.values()))
    return kind not in ("json", "words")
