"""Converts Python values to JSON, or says where and why that is impossible. It uses only the standard library, because
a function's process imports it."""

from __future__ import annotations

import json
from typing import Any, cast

JSON_MAX = 64 << 20
"""Maximum bytes of a row or result."""
_DEPTH = 200


class _Encoder(json.JSONEncoder):
    """Binds the methods at import: a function that patches `json` must not change results."""

    encode = json.JSONEncoder.encode
    iterencode = json.JSONEncoder.iterencode
    default = json.JSONEncoder.default


_plain = _Encoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_escaped = _Encoder(allow_nan=False, separators=(",", ":")).encode
_SCALARS = frozenset({str, int, float, bool, type(None)})
_HINTS = {
    "set": ": use sorted(...) or list(...)",
    "frozenset": ": use sorted(...) or list(...)",
    "bytes": ": decode it, or use base64.b64encode(...).decode()",
    "generator": ": use list(...)",
    "ndarray": ": use .tolist()",
    "Tensor": ": use .tolist()",
    "Series": ": use .tolist()",
    "DataFrame": ': use .to_dict("records")',
    "datetime": ": use .isoformat()",
    "date": ": use .isoformat()",
    "Decimal": ": use float(...) or str(...)",
    "float16": ": use float(...)",
    "float32": ": use float(...)",
    "int32": ": use int(...)",
    "int64": ": use int(...)",
    "PosixPath": ": use str(...)",
}


def encode(value: Any, what: str) -> bytes:
    """Encode `value` as compact JSON. Raises ValueError, naming the part of `what` that is not JSON."""
    try:
        fault = fault_of(value, what)
        if fault:
            raise ValueError(fault)
        data = _plain(value).encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it
        data = _escaped(value).encode()
    if len(data) > JSON_MAX:
        raise ValueError(
            f"{what} is {len(data) >> 20} MiB of JSON, {JSON_MAX >> 20} MiB is the most: store it, pass where"
        )
    return data


def fault_of(value: Any, path: str, depth: int = 0) -> str:
    """Return where and why `value` is not JSON, or ""."""
    kind = cast("type[Any]", type(value))
    if kind in _SCALARS:
        if kind is float and (value != value or value in (float("inf"), float("-inf"))):
            return f"{path} is {value}, which JSON has no number for: use None or a string instead"
        return ""
    if depth > _DEPTH:
        return f"{path[:100]}... is nested more than {_DEPTH} levels deep, or contains itself"
    if isinstance(value, dict):
        for key, inner in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                return f"{path} has the key {key!r:.100}, which is {a_type(key)}: keys of a JSON object are strings"
            if (type(inner) not in _SCALARS or type(inner) is float) and (
                fault := fault_of(inner, f"{path}[{key!r}]", depth + 1)
            ):
                return fault
        return ""
    if isinstance(value, list | tuple):
        for index, inner in enumerate(cast("list[Any]", value)):
            if (type(inner) not in _SCALARS or type(inner) is float) and (
                fault := fault_of(inner, f"{path}[{index}]", depth + 1)
            ):
                return fault
        return ""
    if isinstance(value, str | int):
        return ""
    if isinstance(value, float):
        return fault_of(float(value), path, depth)
    return f"{path} is {a_type(value)}, which is no JSON value{_HINTS.get(kind.__name__, '')}"


def type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def a_type(value: Any) -> str:
    """Return the name of its type with an article."""
    kind = cast("type[Any]", type(value))
    name = type_name(kind)
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
