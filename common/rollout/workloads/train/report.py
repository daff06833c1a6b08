"""What became of the rows of a dataset: every row lands in a counter, and every fault has its policy.

`data-report.json` holds it, and it is printed before the first step.
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
"""Rows that the report names for each fault."""


class Place(NamedTuple):
    """Of a row: `number` among all of the dataset, from 1; `line` of `file`, or its row of a table, from 1."""

    number: int
    file: str
    line: int


@dataclass(slots=True)
class Report:
    """`rows` = `kept` + `dropped` + `refused`: those with a fault whose policy is `error`, for which no step is made.

    `truncated`: of the kept ones, how many are cut off at `max_length`. `tokens`, `supervised`: of the kept ones, of a
    pair both sides. `units`: sequences after packing. `places`: where rows with each fault are.
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
    """Of `places`, those of rows that are refused."""
    notes: list[str] = field(default_factory=list[str])
    """What people should know, and no row is to blame for."""

    def count(self, place: Place, encoded: Encoded) -> bool:
        """Whether the row is kept."""
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
    """The report of one dataset for people. `name`: what the dataset is called."""
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
    """A line for each fault whose policy is `error`: where the rows are, what is wrong, and what to do.

    `about`: more of a fault, such as the number of tokens that are allowed. `room`: characters for the rows of each.
    `remedies`: where others help than usually do. `unkept`: faults that have no policy `keep`.
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
    """Rows that cannot be used at all, by what is wrong: `most` kinds of it are told apart."""

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
        """A line for each kind. `room`: characters for the rows of each."""
        return [f"{listed(places, room)}: {message}" for message, places in self._places.items()]


def listed(places: Sequence[Place], room: int) -> str:
    """`rows.jsonl:3, 7, 12-40, more.jsonl:1 (32 rows)`; and how many more there are where `room` is too small."""
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
    """(file, first line, last line) of lines that follow each other."""
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
    """`[algorithm.KIND.rows]` by fault."""
    return {fault: getattr(rows, fault) for fault in FAULTS}
