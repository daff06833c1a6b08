"""Maps columns of a table to keys of its rows (`[input] columns`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from rollout.model.errors import InputError
from rollout.model.problems import problems

_SHOWN = 20


def row_keys(names: Sequence[str], columns: Mapping[str, str], place: str) -> list[str]:
    """Return the key of each column of a table, in order. `place` names the table in messages. Raises InputError with
    all faults.

    `columns` maps names of columns to keys; other columns keep their names.
    """
    faults = [f"{place}: the header names the column {name!r} twice" for name in _twice(names) if name]
    if "" in names:
        at = ", ".join(str(number) for number, name in enumerate(names, 1) if not name)
        faults.append(f"{place}: columns without a name: {at}: name or remove them")
    for name in columns:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            more = " ..." if len(names) > _SHOWN else ""
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:_SHOWN])}{more}"
            faults.append(f"{place}: there is no column {name!r}, which input.columns names: {hint}")
    keys = [columns.get(name, name) for name in names]
    if not faults:
        faults = [
            f"{place}: input.columns makes two columns {key!r} of a row: "
            f"{', '.join(repr(name) for name, one in zip(names, keys, strict=True) if one == key)}"
            for key in _twice(keys)
        ]
    if faults:
        raise InputError(problems(faults))
    return keys


def _twice(names: Sequence[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]
