"""The files of a batch against what was asked for and what the ledger holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3

from chaos.checker.ledger import DONE, FAILED, Ledger, brief
from chaos.ledger_reader import Row


@dataclass(frozen=True)
class Expected:
    """What was asked for. `rows` as in the input file; those whose prompt contains `poison` must fail."""

    directory: Path
    rows: list[dict[str, Any]]
    poison: str = ""


def check_files(expected: Expected, ledger: Ledger) -> list[str]:
    """Every row once over completions.jsonl and errors.jsonl, in the order of the commit log, as the ledger has it."""
    run_id = (expected.directory / "run-id").read_text().strip()
    run = next((row for row in ledger.runs if row[0] == run_id), None)
    if run is None:
        return [f"{expected.directory}: run {run_id} is not in the ledger"]
    results = {row[1]: row for row in ledger.results if row[0] == run[1]}
    found: list[str] = []
    done = _lines(expected.directory / "completions.jsonl", found)
    failed = _lines(expected.directory / "errors.jsonl", found)
    numbers = [line["n"] for line in done] + [line["input"]["n"] for line in failed]
    times = Counter(numbers)
    found += brief((f"row {n} is there {k} times" for n, k in times.items() if k > 1), "rows more than once")
    found += brief((f"row {row['n']} is nowhere" for row in expected.rows if row["n"] not in times), "rows missing")
    found += brief((f"row {n} was never asked for" for n in set(times) - {r["n"] for r in expected.rows}), "rows")
    found += brief(_order("completions.jsonl", [line["n"] for line in done], results, run[3]), "order")
    found += brief(_order("errors.jsonl", [line["input"]["n"] for line in failed], results, run[3]), "order")
    found += brief(_content(expected, done, failed, results), "content")
    found += _summary(expected, run_id, done, failed, results)
    return [f"{expected.directory}: {objection}" for objection in found]


def check_taken(expected: Expected, ledger: Ledger) -> list[str]:
    """Of rows from a queue, in whatever order they came: each once in the ledger, and once in the files, as it was."""
    run_id = (expected.directory / "run-id").read_text().strip()
    run = next((row for row in ledger.runs if row[0] == run_id), None)
    if run is None:
        return [f"{expected.directory}: run {run_id} is not in the ledger"]
    found: list[str] = []
    lines = _lines(expected.directory / "completions.jsonl", found)
    failed = _lines(expected.directory / "errors.jsonl", found)
    times = Counter(line["n"] for line in lines)
    prompts = {row["n"]: row["prompt"] for row in expected.rows}
    in_ledger = sum(1 for row in ledger.results if row[0] == run[1])
    if in_ledger != len(expected.rows):
        found.append(f"{len(expected.rows)} messages were sent, the ledger has {in_ledger} results")
    found += brief((f"line {line} failed" for line in failed), "failures")
    found += brief((f"row {n} is there {k} times" for n, k in times.items() if k > 1), "rows more than once")
    found += brief((f"row {n} is nowhere" for n in prompts if n not in times), "rows missing")
    wrong = (line["n"] for line in lines if line["completion"] != f"MOCK:{prompts.get(line['n'])}")
    found += brief((f"row {n} has another row's completion" for n in wrong), "content")
    return [f"{expected.directory}: {objection}" for objection in found]


def _lines(path: Path, found: list[str]) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        found.append(f"{path.name} ends in half a line")
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError:
            found.append(f"{path.name}:{number} is not JSON")
    return lines


def _order(name: str, numbers: list[int], results: Mapping[int, Row], order: str) -> Iterator[str]:
    places = [(n if order != "arrival" else results[n][7], n) for n in numbers if n in results]
    for (earlier, _), (later, n) in pairwise(places):
        if earlier >= later:
            yield f"{name}: row {n} is out of order"
    if order == "arrival" and sorted(row[7] for row in results.values()) != list(range(len(results))):
        yield f"{name}: the places in the commit log are not 0 to {len(results) - 1}"


def _content(
    expected: Expected, done: list[dict[str, Any]], failed: list[dict[str, Any]], results: Mapping[int, Row]
) -> Iterator[str]:
    rows = {row["n"]: row for row in expected.rows}
    for line in done:
        n = line["n"]
        row, result = rows.get(n), results.get(n)
        if row is None or result is None:
            yield f"completed row {n} has no result in the ledger or was not asked for"
            continue
        if result[3] != DONE:
            yield f"row {n} is completed in the file, its outcome in the ledger is {result[3]}"
        if line["prompt"] != row["prompt"] or line["completion"] != f"MOCK:{row['prompt']}":
            yield f"row {n} has another row's prompt or completion"
        if line["completion_blob_id"] != blake3(line["completion"].encode()).hexdigest():
            yield f"row {n}: completion_blob_id is not the hash of the completion"
        if line["generated_at"] != _time(result[6]):
            yield f"row {n} was generated at {line['generated_at']}, accepted at {_time(result[6])}"
        if result[8] is not None and json.loads(bytes(result[8]))["choices"][0]["text"] != line["completion"]:
            yield f"row {n}: the ledger holds another completion than the file"
        if expected.poison and expected.poison in row["prompt"]:
            yield f"row {n} had to fail and is completed"
    for line in failed:
        n = line["input"]["n"]
        result = results.get(n)
        if result is None or result[3] != FAILED or result[4] != line["code"] or not 1 <= line["attempts"] <= result[2]:
            yield f"row {n} failed with {line['code']} after {line['attempts']}, the ledger has {result and result[2:6]}"
        meant = bool(expected.poison) and expected.poison in rows.get(n, {}).get("prompt", "")
        if not meant or line["code"] != "mock_failure":
            yield f"row {n} failed with {line['code']}: {line['message']}"


def _summary(
    expected: Expected,
    run_id: str,
    done: list[dict[str, Any]],
    failed: list[dict[str, Any]],
    results: Mapping[int, Row],
) -> Iterator[str]:
    path = expected.directory / "summary.json"
    if not path.exists():
        yield "there is no summary.json"
        return
    claim = json.loads(path.read_text())
    counts = claim["rows"]
    truth = {
        "run_id": (claim["run_id"], run_id),
        "state": (claim["state"], "completed"),
        "rows.total": (counts["total"], len(expected.rows)),
        "rows.committed": (counts["committed"], len(results)),
        "rows.completed": (counts["completed"], len(done)),
        "rows.failed": (counts["failed"], len(failed)),
    }
    for key, (claimed, true) in truth.items():
        if claimed != true:
            yield f"summary.json claims {key} = {claimed}, it is {true}"
    # Those that began: at least one a row, at most as many as were assigned.
    tries, assigned = claim["attempts"]["total"], sum(row[2] for row in results.values())
    if not len(results) <= tries <= assigned:
        yield f"summary.json claims attempts.total = {tries}, of {len(results)} rows and {assigned} assignments"


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
