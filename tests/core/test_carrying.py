"""A run that carries results on: its files are those of one run over all rows, wherever it was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import ConfigError, StateError
from rollout.model.item import INVALID, Failure, Outcome
from rollout.workloads.carrying import CARRIED, Carried, carry_over
from rollout.workloads.carrying_writer import CarryingWriter
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Totals

FIRST, SECOND = "01J00000000000000000000000", "01J00000000000000000000001"
ROWS = 12
FAILED = {2: "hot", 3: "cold", 7: "hot", 11: "invalid_row"}


class Lines:
    """A line for each row, in the way of `infer`."""

    def __init__(self, files: Sequence[str] = ("completions.jsonl", "errors.jsonl", "openai.jsonl")) -> None:
        self.files = tuple(files)

    def lines(self, entry: CommitEntry) -> Iterator[tuple[str, bytes]]:
        row, done = entry.seq + 1, entry.outcome is Outcome.DONE
        if done:
            first = "embeddings.jsonl" if "embeddings.jsonl" in self.files and row % 2 else "completions.jsonl"
            yield first, _line({"row": row})
        else:
            assert entry.failure is not None
            yield "errors.jsonl", _line({"row": row, "code": entry.failure.code})
        if "openai.jsonl" in self.files:
            yield "openai.jsonl", _line({"row": row, "error": None if done else {}})

    def summary(self, summary: JsonObject, totals: Totals) -> JsonObject:
        return summary


def _line(fields: JsonObject) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def entries(rows: Sequence[int], failed: dict[int, str], seqs: Sequence[int] | None = None) -> list[CommitEntry]:
    """In commit order. `seqs`: of the run, where these are not the rows."""
    return [
        CommitEntry(
            position=position,
            seq=seq,
            attempt=1,
            outcome=Outcome.FAILED if row in failed else Outcome.DONE,
            data=b"",
            payload=b"{}",
            id=bytes(32),
            failure=Failure(failed[row], "", retryable=False) if row in failed else None,
        )
        for position, (row, seq) in enumerate(zip(rows, seqs or rows, strict=True))
    ]


def first_run(path: Path, writer: Lines, order: Sequence[int] = range(ROWS), name: str = "schedule") -> JsonObject:
    config: JsonObject = {"input": {"rows": ROWS}, "run": {"order": name}}
    with OutputDirectory.open(path) as output:
        output.claim(FIRST, config)
        collector = Collector(output, FIRST, writer, total=ROWS)
        collector.add(entries(order, FAILED))
        collector.finish("completed")
        collector.close()
    return config


def next_run(path: Path, config: JsonObject, writer: Lines, carried: Carried, failed: dict[int, str]) -> JsonObject:
    """Its summary. Every entry, and every piece that is carried on, is written by a collector of its own."""
    config = {**config, CARRIED: carried.section()}
    rows = [carried.row(seq) for seq in range(carried.total)]
    log = entries(rows, failed, range(carried.total))
    with OutputDirectory.open(path) as output:
        output.hand_over(SECOND, config)
        for count in range(len(log) + 1):
            again = Collector(output, SECOND, CarryingWriter(writer, config, "rows"), total=carried.total)
            again.add(log[:count])
            again.flush()
            again.close()
        last = Collector(output, SECOND, CarryingWriter(writer, config, "rows"), total=carried.total)
        summary = last.finish("completed")
        last.close()
        looked = Collector(output, SECOND, CarryingWriter(writer, config, "rows"), total=carried.total)
        assert looked.complete and looked.summary == summary
        looked.close()
    return summary


def rows_in(path: Path, name: str) -> list[int]:
    return [json.loads(line)["row"] - 1 for line in (path / name).read_bytes().splitlines()]


def test_failed_rows_are_merged_in_the_order_of_the_input(tmp_path: Path) -> None:
    config = first_run(tmp_path, Lines())
    told: list[str] = []
    carried = carry_over(tmp_path, config, Lines().files, ROWS, frozenset(), tell=told.append)
    assert len(told) == len(Lines().files), "a piece of each file was copied"
    assert carried.retried == (2, 3, 7) and carried.failed == (11,)
    summary = next_run(tmp_path, config, Lines(), carried, {3: "cold"})
    assert rows_in(tmp_path, "completions.jsonl") == [row for row in range(ROWS) if row not in (3, 11)]
    assert rows_in(tmp_path, "errors.jsonl") == [3, 11]
    assert rows_in(tmp_path, "openai.jsonl") == list(range(ROWS))
    expected = {"total": ROWS, "committed": ROWS, "completed": ROWS - 2, "failed": 2}
    assert {key: summary["rows"][key] for key in expected} == expected
    assert summary[CARRIED] == {"run_id": FIRST, "rows": ROWS - 3}


def test_only_rows_with_the_code_run_again(tmp_path: Path) -> None:
    config = first_run(tmp_path, Lines())
    assert carry_over(tmp_path, config, Lines().files, ROWS, frozenset(["hot"])).retried == (2, 7)
    with pytest.raises(ConfigError, match=r"cold \(1\), hot \(2\), invalid_row \(1\)"):
        carry_over(tmp_path, config, Lines().files, ROWS, frozenset(["warm"]))
    with pytest.raises(ConfigError, match=f"--code {INVALID}"):
        carry_over(tmp_path, config, Lines().files, ROWS, frozenset(["hot", INVALID]))


def test_new_rows_follow_those_before_them_and_a_third_run_carries_both_on(tmp_path: Path) -> None:
    config = first_run(tmp_path, Lines())
    carried = carry_over(tmp_path, config, Lines().files, ROWS + 3, None)
    next_run(tmp_path, config, Lines(), carried, {13: "hot"})
    assert rows_in(tmp_path, "openai.jsonl") == list(range(ROWS + 3))
    assert rows_in(tmp_path, "errors.jsonl") == [*FAILED, 13]
    longer = {**config, "input": {"rows": ROWS + 3}, CARRIED: carried.section()}
    third = carry_over(tmp_path, longer, Lines().files, ROWS + 3, frozenset(["hot"]))
    assert third.retried == (2, 7, 13)
    assert {key: third.totals[key] for key in ("rows", "done", "failed")} == {"rows": 12, "done": 10, "failed": 2}


def test_files_in_the_order_of_arrival_keep_what_was_there_first(tmp_path: Path) -> None:
    order = [5, 7, 0, 2, 11, 1, 3, 4, 6, 10, 9, 8]
    config = first_run(tmp_path, Lines(), order, "arrival")
    carried = carry_over(tmp_path, config, Lines().files, ROWS, frozenset())
    next_run(tmp_path, config, Lines(), carried, {})
    again = [row for row in order if row not in (2, 3, 7)]
    assert rows_in(tmp_path, "completions.jsonl") == [row for row in again if row != 11] + [2, 3, 7]
    assert rows_in(tmp_path, "openai.jsonl") == [*again, 2, 3, 7]
    assert rows_in(tmp_path, "errors.jsonl") == [11]


def test_rows_that_share_two_files_are_in_the_order_of_the_input(tmp_path: Path) -> None:
    lines = Lines(("completions.jsonl", "embeddings.jsonl", "errors.jsonl"))
    config = first_run(tmp_path, lines)
    apart = {"embeddings.jsonl": range(0, ROWS + 2, 2)}
    next_run(tmp_path, config, lines, carry_over(tmp_path, config, lines.files, ROWS + 2, frozenset(), apart), {})
    assert rows_in(tmp_path, "completions.jsonl") == [1, 3, 5, 7, 9, 13]
    assert rows_in(tmp_path, "embeddings.jsonl") == [0, 2, 4, 6, 8, 10, 12]


def test_a_file_that_only_new_rows_have_is_begun(tmp_path: Path) -> None:
    config = first_run(tmp_path, Lines(("completions.jsonl", "errors.jsonl")))
    both = Lines(("completions.jsonl", "embeddings.jsonl", "errors.jsonl"))
    apart = {"embeddings.jsonl": [ROWS]}
    next_run(tmp_path, config, both, carry_over(tmp_path, config, both.files, ROWS + 2, None, apart), {})
    assert rows_in(tmp_path, "completions.jsonl") == [row for row in range(ROWS) if row not in FAILED] + [ROWS + 1]
    assert rows_in(tmp_path, "embeddings.jsonl") == [ROWS]


def test_other_files_than_before_are_refused(tmp_path: Path) -> None:
    config = first_run(tmp_path, Lines())
    with pytest.raises(ConfigError, match=r"openai\.jsonl"):
        carry_over(tmp_path, config, ("completions.jsonl", "errors.jsonl"), ROWS, None)


@pytest.mark.parametrize("harm", ["delete", "edit"])
def test_what_was_copied_is_not_believed_unseen(tmp_path: Path, harm: str) -> None:
    config = first_run(tmp_path, Lines())
    section = carry_over(tmp_path, config, Lines().files, ROWS + 1, None).section()
    copy = tmp_path / section["directory"] / "completions.jsonl"
    copy.unlink() if harm == "delete" else copy.write_bytes(copy.read_bytes().replace(b"1", b"2"))
    with pytest.raises(StateError, match=section["directory"]):
        Carried.read(tmp_path, section)


def test_results_are_written_elsewhere_without_what_is_carried_on(tmp_path: Path) -> None:
    config: dict[str, Any] = {"run": {}, "input": {"rows": 14}}
    config[CARRIED] = {"run_id": FIRST, "directory": ".carried-x", "rows": 12, "retried": 0, "added": 2}
    with OutputDirectory.open(tmp_path) as output:
        collector = Collector(output, SECOND, CarryingWriter(Lines(), config, "rows", alone=True), total=2)
        collector.add(entries([12, 13], {}, [0, 1]))
        assert collector.finish("completed")["rows"]["total"] == 2
        collector.close()
    assert rows_in(tmp_path, "completions.jsonl") == [12, 13]
