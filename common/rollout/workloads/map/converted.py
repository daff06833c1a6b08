"""Converts results that are not JSON but have an obvious form in it: arrays, times, decimals, dataclasses, sets.

It uses only modules that a function's process imports anyway. Types are recognised by name: a process that has an array
has imported numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from rollout.workloads.values import a_type, encode, fault_of

_DEPTH = 200
_Form = Callable[[Any], Any]


def encode_result(value: Any) -> bytes:
    """Encode `value` as compact JSON, converting parts where necessary. Raises ValueError, naming the part that cannot
    be."""
    if fault_of(value, "result"):
        value = converted(value, "result")
    return encode(value, "result")


def converted(value: Any, path: str, depth: int = 0) -> Any:
    """Return `value` with all parts converted to JSON values. Raises ValueError, naming the part that cannot be."""
    if depth > _DEPTH:
        raise ValueError(f"{path[:100]}... is nested more than {_DEPTH} levels deep, or contains itself")
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {_key(key, path): converted(inner, f"{path}[{key!r}]", depth + 1) for key, inner in items}
    if isinstance(value, list | tuple):
        inners = enumerate(cast("list[Any]", value))
        return [converted(inner, f"{path}[{index}]", depth + 1) for index, inner in inners]
    fields: dict[str, Any] | None = getattr(cast(Any, type(value)), "__dataclass_fields__", None)
    if fields is not None:
        return {
            name: converted(getattr(value, name), f"{path}.{name}", depth + 1)
            for name, one in fields.items()
            if one._field_type.name == "_FIELD"  # not a ClassVar, nor an InitVar
        }
    if isinstance(value, set | frozenset):
        members = [converted(one, f"a member of {path}", depth + 1) for one in cast("set[Any]", value)]
        try:
            return sorted(members)
        except TypeError:  # of several kinds: any order will do that is always the same
            return sorted(members, key=lambda one: encode(one, path))
    form = _form(cast("type[Any]", type(value)))
    if form is None:
        if fault := fault_of(value, path, depth):
            raise ValueError(fault)
        return value
    plain = form(value)
    if type(plain) is type(value):
        raise ValueError(f"{path} is {a_type(value)}, which has no form in JSON")
    return converted(plain, path, depth + 1)


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path} has the key {key!r:.100}, which is {a_type(key)}: keys of a JSON object are strings")
    return key


def _array(value: Any) -> Any:
    if value.ndim == 0:
        return value[()]
    return list(value) if value.dtype.kind in "mMO" else value.tolist()


_NOT_A_NUMBER = float("nan")
"""Stands for a missing time (NaT), which is then reported as a fault."""
_FORMS: dict[tuple[str, str], _Form] = {
    ("datetime", "datetime"): lambda value: value.isoformat(),
    ("datetime", "date"): lambda value: value.isoformat(),
    ("datetime", "time"): lambda value: value.isoformat(),
    ("datetime", "timedelta"): lambda value: value.total_seconds(),
    ("decimal", "Decimal"): str,
    ("uuid", "UUID"): str,
    ("pathlib", "PurePath"): str,
    ("enum", "Enum"): lambda value: value.value,
    ("numpy", "ndarray"): _array,
    ("numpy", "datetime64"): lambda value: str(value) if value == value else _NOT_A_NUMBER,
    ("numpy", "timedelta64"): lambda value: float(value / type(value)(1, "s")),
    ("numpy", "generic"): lambda value: value.item(),
}


def _form(kind: type[Any]) -> _Form | None:
    for base in kind.__mro__:
        form = _FORMS.get((base.__module__.partition(".")[0], base.__name__))
        if form is not None:
            return form
    return None
