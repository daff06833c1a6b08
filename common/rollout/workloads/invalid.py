"""Unusable rows in a run that continues without them (`[input] on_bad_row = "skip"`).

Each is an item like any other: its place in the input is its place in the ledger, so order, resume and final counts
need no special rule. Its payload has the fault, with which its executor fails it at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, INVALID, ItemSpec, NewItem
from rollout.workloads.json_form import dump_line, parse_json

if TYPE_CHECKING:  # an executor needs no input files
    from rollout.workloads.input_lines import Line

_MARK = b"\0"  # begins no JSON
_TEXT_MAX = 100_000


@dataclass(frozen=True, slots=True)
class InvalidRow:
    """`input` is the JSON value of the line or, if it is not JSON, its text, truncated if very long. `repeats` means
    that its id is that of an earlier row."""

    fault: str
    input: Any
    file: str
    line: int
    repeats: bool = False


def invalid_item(line: Line, spec: ItemSpec = DEFAULT_SPEC) -> NewItem:
    """Return the item of a line with a `fault`."""
    try:
        value = parse_json(line.raw)
    except ValueError:
        value = line.raw.decode("utf-8", "replace")[:_TEXT_MAX]
    fields = {"fault": line.fault, "input": value, "file": line.file, "line": line.line}
    payload = _MARK + dump_line(fields | ({"repeats": True} if line.repeats else {}))
    identity = blake3(b"invalid" + line.index.to_bytes(8, "little") + line.raw).digest()
    return NewItem(identity, payload, spec)


def invalid_of(payload: bytes) -> InvalidRow | None:
    """Decode a payload of `invalid_item`; None if it is that of a valid row."""
    return InvalidRow(**json.loads(payload[1:])) if payload[:1] == _MARK else None


def refuse_invalid(payload: bytes) -> None:
    """Raise the AttemptError that ends such an item; for executors."""
    if (row := invalid_of(payload)) is not None:
        raise AttemptError(row.fault, code=INVALID, retry=False)
