"""Reports how the rows of a dataset were treated: every row is counted, and every fault has a policy.

`data-report.json` contains the report, and it is printed before the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollout.model.counts import counted
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.encode import FAULTS, Encoded, Fault

SHOWN = 20
"""Number of rows to name for each fault."""


class Place(NamedTuple):
    """The place of a row. `number` counts all rows of the dataset from 1. `line` is that of `file`, or the row of a
    table, from 1."""

    number: int
    file: str
    line: int


@dataclass(slots=True)
class Report:
    """`rows` = `kept` + `dropped` + `refused`. Refused rows have a fault whose policy is `error`; training does not
    start.

    `truncated` counts kept rows that exceeded `max_length`. `tokens` and `supervised` count kept rows, both sides of a
    pair. `units` are sequences after packing. `places` has the rows with each fault.
    """

    policies: dict[str, str]
    rows: int = 0
    kept: int = 0
    dropped: int = 0
    refused: int = 0
    truncated: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    units: int = 0
    faults: Counter[Fault] = field(default_factory=Counter[Fault])
    places: dict[Fault, list[Place]] = field(default_factory=dict[Fault, list[Place]])
    errors: dict[Fault, list[Place]] = field(default_factory=dict[Fault, list[Place]])
    """The part of `places` that belongs to refused rows."""
    notes: list[str] = field(default_factory=list[str])
    """Notes for the user that concern no single row."""

    def count(self, place: Place, encoded: Encoded) -> bool:
        """Count a row, and return whether it is kept."""
        self.rows += 1
        for fault in encoded.faults:
            self.faults[fault] += 1
            shown = self.places.setdefault(fault, [])
            if len(shown) < SHOWN:
                shown.append(place)
        policies = {self.policies[fault] for fault in encoded.faults}
        if "drop" in policies:
            self.dropped += 1
            return False
        if "error" in policies:
            self.refused += 1
            for fault in encoded.faults:
                if self.policies[fault] == "error":
                    self.errors.setdefault(fault, []).append(place)
            return False
        self.kept += 1
        self.truncated += encoded.cut
        for sequence in encoded.sequences:
            self.tokens += len(sequence.ids)
            self.supervised += sequence.supervised
            self.longest = max(self.longest, len(sequence.ids))
        return True

    def to_json(self) -> JsonObject:
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": self.dropped,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "longest": self.longest,
            "sequences": self.units,
            "notes": self.notes,
            "faults": {
                fault: {
                    "rows": self.faults[fault],
                    "policy": self.policies[fault],
                    "first": [f"{place.file}:{place.line}" for place in self.places.get(fault, [])],
                    "first_rows": [place.number for place in self.places.get(fault, [])],
                }
                for fault in FAULTS
            },
        }


def report_lines(name: str, report: JsonObject) -> list[str]:
    """Format the report of a dataset called `name`."""
    rows = f"{counted(report['rows'], 'row')}: {report['kept']:,} kept, {report['dropped']:,} dropped"
    truncated = f", {report['truncated']:,} cut off" if report["truncated"] else ""
    packed = f" in {counted(report['sequences'], 'sequence')}" if report["sequences"] < report["kept"] else ""
    # Of prompts none is: samples are learnt.
    learnt = f", of which {report['supervised_tokens']:,} are learnt" if report["supervised_tokens"] else ""
    lines = [
        f"{name}: {rows}{truncated}; {counted(report['tokens'], 'token')}{packed}{learnt}; the longest sequence has "
        f"{report['longest']:,}"
    ]
    for fault, found in report["faults"].items():
        if found["rows"]:
            where = ", ".join(found["first"][:5]) + (" ..." if found["rows"] > 5 else "")
            lines.append(f"  {found['rows']:,} with {fault} ({_DONE.get(found['policy'], found['policy'])}): {where}")
    return lines + [f"  {note}" for note in report.get("notes", ())]  # reports of older runs have none


_DONE = {"drop": "dropped", "keep": "kept", "error": "dropped for another fault"}


def faults_to_tell(
    report: Report,
    about: Mapping[Fault, str],
    room: int,
    remedies: Mapping[Fault, str] | None = None,
    unkept: Collection[Fault] = (),
) -> list[str]:
    """Return a line for each fault whose policy is `error`: the rows, the fault, and the remedy.

    `about` adds details to a fault, such as the number of tokens allowed. `room` is the number of characters for the
    rows of each. `remedies` replace the usual ones. `unkept` are faults that have no policy `keep`.
    """
    helps = {**_REMEDY, **(remedies or {})}
    lines: list[str] = []
    for fault in FAULTS:
        places = report.errors.get(fault)
        if places:
            what = f"{fault}{about.get(fault, '')}"
            policy = f'or set rows.{fault} = "drop"' + ("" if fault in unkept else ' or "keep"')
            lines.append(f"{listed(places, room)}: {what}: {helps[fault]}, {policy}")
    return lines


class BadRows:
    """Collects unusable rows by fault; at most `most` kinds of fault are distinguished."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[str, list[Place]] = {}

    def add(self, place: Place, message: str) -> None:
        known = message in self._places or len(self._places) < self._most
        self._places.setdefault(message if known else "other faults of rows like these", []).append(place)

    @property
    def kinds(self) -> int:
        return len(self._places)

    def lines(self, room: int) -> list[str]:
        """Return a line for each kind. `room` is the number of characters for the rows of each."""
        return [f"{listed(places, room)}: {message}" for message, places in self._places.items()]


def listed(places: Sequence[Place], room: int) -> str:
    """Return `rows.jsonl:3, 7, 12-40, more.jsonl:1 (32 rows)`, with the number of further rows if `room` is too
    small."""
    parts: list[str] = []
    told, size, before = 0, 0, ""
    for file, first, last in _runs(places):
        lines = str(first) if first == last else f"{first}-{last}"
        part = lines if file == before else f"{file}:{lines}"
        size += len(part) + 2
        if size > room and parts:
            return f"{', '.join(parts)} and {len(places) - told:,} more of {len(places):,} rows"
        parts.append(part)
        told, before = told + last - first + 1, file
    return ", ".join(parts) + (f" ({len(places):,} rows)" if len(places) > 1 else "")


def _runs(places: Sequence[Place]) -> Iterable[tuple[str, int, int]]:
    """Yield (file, first line, last line) of consecutive lines."""
    found: tuple[str, int, int] | None = None
    for place in places:
        if found is not None and found[0] == place.file and place.line in (found[2], found[2] + 1):
            found = (found[0], found[1], place.line)
            continue
        if found is not None:
            yield found
        found = (place.file, place.line, place.line)
    if found is not None:
        yield found


_REMEDY: dict[Fault, str] = {
    "no_supervised_token": "nothing in it would be learnt: look at loss_on and max_length",
    "stop_token_outside": "the model would never learn to stop: move {% endgeneration %} behind the end of the turn",
    "merged_at_seam": "prompt and completion together do not begin with the tokens of the prompt",
    "two_bos": "the text has a beginning-of-sequence token and the tokenizer adds one: take it out of the text",
    "too_long": "raise max_length, or shorten it (keep: it is cut off at the end)",
    "empty_completion": "remove it",
    "message_ignored": "the chat template leaves out a message or its tool calls, so it would teach something else: "
    "give base_model.chat_template, a template that renders them",
    "tools_ignored": 'the chat template leaves out "tools": give base_model.chat_template, a template that renders '
    "them, or remove them",
    "identical_pair": "chosen and rejected are the same tokens: remove it",
}


def policies_of(rows: Any) -> dict[str, str]:
    """Return the policies of `[algorithm.KIND.rows]` by fault."""
    return {fault: getattr(rows, fault) for fault in FAULTS}
