"""The checker objects to every kind of damage, and to nothing where there is none."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from netns_client import Effect
from rollout.config.settings import StorageSection
from rollout.storage import open_storage

from chaos.audit import statements
from chaos.checker.audit import check_audit
from chaos.checker.failures import Window, unexplained
from chaos.checker.files import Expected, check_files
from chaos.checker.ledger import Ledger, check_ledger, load
from chaos.checker.looks import compare, consistent
from chaos.exclusive import THAW_S, overlaps
from chaos.faults.worker import FROZEN
from chaos.ledger_reader import (
    PostgresReader,
    Reader,
    Snapshot,
    SqliteReader,
    in_flight,
    snapshot,
    unpack_keys,
    without_result,
)
from chaos.report import Struck

ORDERED, ARRIVAL = "01J00000000000000000000001", "01J00000000000000000000002"
ROWS = [{"prompt": f"{'poison' if n == 2 else 'row'} {n}", "n": n} for n in range(4)]
ACCEPTED_MS = 1_700_000_000_000
ACCEPTED = "2023-11-14T22:13:20.000Z"


def pack(log: int, seqs: list[int], attempt: int) -> str:
    """assignment.keys as hex."""
    return (struct.pack(f"<QIBB{len(seqs)}Q", log, len(seqs), 1, 0, *seqs) + struct.pack("<Q", attempt)).hex()


def result(log: int, seq: int, attempt: int, worker: str, position: int | None) -> str:
    text = json.dumps({"choices": [{"text": f"MOCK:row {seq}"}]}).encode().hex()
    failed = seq == 2
    place = "NULL" if position is None else position
    return (
        "INSERT INTO result (log, seq, attempt, outcome, data, code, worker, accepted_ms, position) VALUES "
        f"({log}, {seq}, {attempt}, {2 if failed else 1}, {'NULL' if failed else blob(text)}, "
        f"{chr(39) + 'mock_failure' + chr(39) if failed else 'NULL'}, '{worker}', {ACCEPTED_MS}, {place})"
    )


def blob(digits: str) -> str:
    return f"CAST(X'{digits}' AS BLOB)" if not POSTGRES else f"'\\x{digits}'::bytea"


POSTGRES = False
"""Which dialect `blob` writes; set by the `made` fixture."""


def story() -> list[list[str]]:
    """Two runs in six transactions; attempt 1 of row 3 is lost with its worker. One list of statements each."""
    submit: list[str] = []
    for log, run, order in ((1, ORDERED, "schedule"), (2, ARRIVAL, "arrival")):
        submit.append(
            "INSERT INTO run (run_id, workload, state, item_order, root_log, spec, config) VALUES "
            f"('{run}', 'infer', 'running', '{order}', {log}, '{{}}', {blob('7b7d')})"
        )
        submit.append(f"INSERT INTO log (log, run_id, submitted, sealed) VALUES ({log}, '{run}', 4, 1)")
        submit += [
            f"INSERT INTO item (log, seq, id) VALUES ({log}, {n}, {blob(f'{log:02x}{n:02x}')})" for n in range(4)
        ]
    steps = [submit]
    for batch, log in ((1, 1), (2, 2)):
        assign = "INSERT INTO assignment (batch, worker, n, keys) VALUES "
        steps.append([assign + f"({batch}, 'w1', 4, {blob(pack(log, [0, 1, 2, 3], 1))})"])
    steps.append(
        [
            "INSERT INTO attempt (log, seq, attempt, worker, ending) VALUES (1, 3, 1, 'w1', 'worker_lost')",
            f"INSERT INTO assignment (batch, worker, n, keys) VALUES (3, 'w2', 1, {blob(pack(1, [3], 2))})",
        ]
    )
    steps.append(
        [result(1, n, 1, "w1", None) for n in (0, 1, 2)]
        + ["UPDATE log SET cursor = 3, done = 2, failed = 1 WHERE log = 1"]
    )
    order = [3, 0, 2, 1]
    last = [result(2, seq, 1, "w1", place) for place, seq in enumerate(order)]
    last += [
        result(1, 3, 2, "w2", None),
        "UPDATE log SET cursor = 4, done = 3, failed = 1 WHERE log = 1",
        "UPDATE log SET cursor = 4, done = 3, failed = 1 WHERE log = 2",
        "DELETE FROM assignment WHERE batch < 3",
    ]
    steps.append([*last, "UPDATE run SET state = 'completed'"])
    return steps


@dataclass
class Made:
    """A finished campaign in small: its reader and the output directories of the two runs."""

    reader: Reader
    outputs: list[Path]
    order = ([0, 1, 3], [3, 0, 1])

    def expected(self) -> list[Expected]:
        return [Expected(output, ROWS, "poison") for output in self.outputs]

    async def objections(self, **told: Any) -> list[str]:
        ledger = await load(self.reader)
        found = [*check_ledger(ledger), *check_audit(ledger, **told)]
        for expected in self.expected():
            found += check_files(expected, ledger)
        return found


def write_output(directory: Path, run_id: str, order: list[int], attempts: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "run-id").write_text(run_id + "\n")
    lines: list[dict[str, Any]] = []
    for n in order:
        text = f"MOCK:row {n}"
        digest = blake3(text.encode()).hexdigest()
        lines.append({**ROWS[n], "completion": text, "completion_blob_id": digest, "generated_at": ACCEPTED})
    (directory / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    error = {"code": "mock_failure", "message": "", "attempts": 1, "input": ROWS[2]}
    (directory / "errors.jsonl").write_text(json.dumps(error) + "\n")
    rows = {"total": 4, "committed": 4, "completed": 3, "failed": 1}
    summary = {"run_id": run_id, "state": "completed", "rows": rows, "attempts": {"total": attempts}}
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


@pytest.fixture
async def made(storage_section: StorageSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    postgres = storage_section.backend == "postgres"
    monkeypatch.setattr(f"{__name__}.POSTGRES", postgres)
    storage = open_storage(storage_section)
    await storage.open()
    await storage.close()
    reader = (
        PostgresReader(storage_section.postgres.url) if postgres else SqliteReader(Path(storage_section.embedded.path))
    )
    await reader.execute(
        "INSERT INTO lease (one, holder, epoch, batch, beat, address) VALUES (1, 'a', 0, 0, 0, 'here:1')"
    )
    await reader.execute(*statements(storage_section.backend if postgres else "sqlite"))
    for n, step in enumerate(story()):
        if n == 3:  # a takeover in the middle
            await reader.execute("UPDATE lease SET holder = 'b', epoch = 1, address = 'there:1'")
        await reader.execute("UPDATE lease SET batch = batch + 1", *step)
    orders = Made.order
    outputs = [
        write_output(tmp_path / run, run, order, attempts)
        for run, order, attempts in ((ORDERED, orders[0], 5), (ARRIVAL, orders[1], 4))
    ]
    yield Made(reader, outputs)
    await reader.close()


one_database = pytest.mark.parametrize("storage_section", ["sqlite"], indirect=True)
"""For what is the same on both."""


async def test_a_clean_campaign_has_no_objections(made: Made) -> None:
    assert await made.objections() == []
    ledger = await load(made.reader)
    assert len(ledger.seen_results) == 8 and len(ledger.seen_assignments) == 3 and len(ledger.seen_leases) == 2


# Damage in the database after the fact; the phrase that some objection must contain.
SQL = {
    "a result is lost": ("DELETE FROM result WHERE log = 1 AND seq = 1", "seq 1 has no result"),
    "a result is changed": ("UPDATE result SET attempt = 7 WHERE log = 1 AND seq = 1", "result changed"),
    "another worker's result": ("UPDATE result SET worker = 'w9' WHERE log = 1 AND seq = 1", "of w9 is there"),
    "an item is lost": ("DELETE FROM item WHERE log = 1 AND seq = 3", "has a result, no item"),
    "one id twice": ("UPDATE item SET id = (SELECT id FROM item WHERE log = 1 AND seq = 0) WHERE log = 1 AND seq = 1", "two items have one id"),
    "the cursor went back": ("UPDATE log SET cursor = 2 WHERE log = 1", "moved from 4 to 2"),
    "a run is open": ("UPDATE run SET state = 'running' WHERE root_log = 1", "is running"),
    "a log is not sealed": ("UPDATE log SET sealed = 0 WHERE log = 1", "is not sealed"),
    "the counts differ": ("UPDATE log SET done = 4 WHERE log = 1", "log 1 counts"),
    "of an attempt that ended": ("INSERT INTO attempt (log, seq, attempt, worker, ending) VALUES (1, 3, 2, 'w2', 'released')", "which ended released"),
    "of an attempt before the last": ("INSERT INTO attempt (log, seq, attempt, worker, ending) VALUES (1, 3, 3, 'w2', 'released')", "after attempt 3 had ended"),
    "the epoch skips": ("UPDATE lease SET epoch = 3", "the epoch went from 1"),
    "the epoch goes back": ("UPDATE lease SET epoch = 0", "the epoch went from 1"),
    "the batch goes back": ("UPDATE lease SET batch = 1", "batch number went back"),
    "places in the log": ("UPDATE result SET position = 7 WHERE log = 2 AND seq = 1", "places in the commit log"),
    "another outcome": ("UPDATE result SET outcome = 2 WHERE log = 1 AND seq = 1", "its outcome in the ledger is 2"),
    "accepted at another time": ("UPDATE result SET accepted_ms = 5 WHERE log = 1 AND seq = 1", "accepted at 1970"),
}  # fmt: skip


@one_database
@pytest.mark.parametrize("what", SQL)
async def test_damage_in_the_ledger_is_seen(made: Made, what: str) -> None:
    statement, phrase = SQL[what]
    await made.reader.execute(statement)
    found = await made.objections()
    assert any(phrase in objection for objection in found), found


async def test_an_open_attempt_is_seen(made: Made) -> None:
    await made.reader.execute(
        "DELETE FROM result WHERE log = 1 AND seq = 0",
        f"INSERT INTO assignment (batch, worker, n, keys) VALUES (9, 'w1', 1, {blob(pack(1, [0], 5))})",
    )
    assert any("attempt 5 is still open" in objection for objection in await made.objections())


def _drop(ledger: Ledger, name: str, n: int) -> Ledger:
    rows = getattr(ledger, name)
    return replace(ledger, **{name: rows[:n] + rows[n + 1 :]})


def _change(ledger: Ledger, name: str, n: int, **cells: Any) -> Ledger:
    """`c3=5`: cell 3 of that row becomes 5."""
    rows = list(getattr(ledger, name))
    row = list(rows[n])
    for cell, value in cells.items():
        row[int(cell[1:])] = value
    rows[n] = tuple(row)
    return replace(ledger, **{name: rows})


# What the triggers would have seen of an engine that breaks its promises.
AUDIT: dict[str, tuple[Callable[[Ledger], Ledger], str]] = {
    "written under an older epoch": (lambda k: _change(k, "seen_results", 7, c5=0), "was written under epoch 0"),
    "accepted of a superseded attempt": (lambda k: _change(k, "seen_assignments", 1, c2=bytes.fromhex(pack(1, [1], 2)), c4=3), "after attempt 2 was given out"),
    "given to two": (lambda k: _change(k, "seen_assignments", 2, c1="w9", c2=bytes.fromhex(pack(1, [0], 1))), "was given to w1 and to w9"),
    "by a worker that did not have it": (lambda k: _change(k, "seen_results", 0, c4="w9"), "belonged to w1"),
    "never given out": (lambda k: _drop(k, "seen_assignments", 0), "belonged to None"),
    "written twice": (lambda k: _change(k, "seen_results", 1, c2=0), "a second result was written"),
    "the cursor jumps": (lambda k: _drop(k, "seen_cursors", 0), "the cursor was at 0 and moved from 3"),
    "committed before it was there": (lambda k: _change(k, "seen_cursors", 0, c5=2), "passed seq 0 before"),
    "committed in order of arrival before it was there": (lambda k: _change(k, "seen_cursors", 2, c5=2), "fewer results are there"),
    "written by nobody": (lambda k: _drop(k, "seen_results", 0), "a result that nobody wrote"),
    "a takeover that nobody saw": (lambda k: _drop(k, "seen_leases", 1), "the lease is at epoch 1"),
}  # fmt: skip


@one_database
@pytest.mark.parametrize("what", AUDIT)
async def test_a_broken_promise_is_seen(made: Made, what: str) -> None:
    damage, phrase = AUDIT[what]
    found = check_audit(damage(await load(made.reader)))
    assert any(phrase in objection for objection in found), found


async def test_only_the_holder_of_an_epoch_writes_under_it(made: Made) -> None:
    ledger = await load(made.reader)
    port = int(ledger.seen_results[0][-1])
    leaders = {0: "coordinator-1", 1: "coordinator-2"}
    both = {port: {"coordinator-1", "coordinator-2"}}
    assert check_audit(ledger, leaders, both) == []
    found = check_audit(ledger, leaders, {port: {"coordinator-1"}})
    assert any("of epoch 1, led by coordinator-2, was written by {'coordinator-1'}" in objection for objection in found)


def _lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def _summary(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    claim = json.loads((path / "summary.json").read_text())
    change(claim)
    (path / "summary.json").write_text(json.dumps(claim))


# Damage in the output directory of the run in schedule order (0) or in order of arrival (1).
FILES: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "a row is missing": (0, lambda d: _lines(d / "completions.jsonl", lambda k: k[:1] + k[2:]), "row 1 is nowhere"),
    "a row twice": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [*k, k[-1]]), "row 3 is there 2 times"),
    "completed and failed": (0, lambda d: _lines(d / "errors.jsonl", lambda k: [*k, k[0].replace('"n": 2', '"n": 1')]), "row 1 is there 2 times"),
    "out of order": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [k[1], k[0], k[2]]), "row 0 is out of order"),
    "not as committed": (1, lambda d: _lines(d / "completions.jsonl", lambda k: sorted(k, key=lambda x: json.loads(x)["n"])), "row 3 is out of order"),
    "a torn line": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [*k[:2], k[2][:-20]]), "is not JSON"),
    "half a line": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [*k[:2], k[2][:-1]]), "ends in half a line"),
    "another completion": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [k[0].replace("MOCK:row 0", "MOCK:row 9"), *k[1:]]), "another row's prompt or completion"),
    "another hash": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [k[0].replace('blob_id": "', 'blob_id": "0'), *k[1:]]), "is not the hash"),
    "a row nobody asked for": (0, lambda d: _lines(d / "completions.jsonl", lambda k: [*k, k[0].replace('"n": 0', '"n": 8')]), "row 8 was never asked for"),
    "failed for another reason": (0, lambda d: _lines(d / "errors.jsonl", lambda k: [k[0].replace("mock_failure", "worker_lost")]), "failed with worker_lost"),
    "no summary": (0, lambda d: (d / "summary.json").unlink(), "no summary.json"),
    "a false state": (0, lambda d: _summary(d, lambda c: c.update(state="running")), "claims state"),
    "a false count": (0, lambda d: _summary(d, lambda c: c["rows"].update(completed=4)), "claims rows.completed = 4, it is 3"),
    "false attempts": (0, lambda d: _summary(d, lambda c: c["attempts"].update(total=99)), "claims attempts.total"),
    "another run": (0, lambda d: (d / "run-id").write_text("01J00000000000000000000009"), "is not in the ledger"),
}  # fmt: skip


@one_database
@pytest.mark.parametrize("what", FILES)
async def test_damage_in_the_files_is_seen(made: Made, what: str) -> None:
    which, damage, phrase = FILES[what]
    damage(made.outputs[which])
    found = await made.objections()
    assert any(phrase in objection for objection in found), found


# ---- while it runs

BEFORE = Snapshot(1, 10, "a", {1: 5}, {1: (9, 1)}, {"r": 1}, {"r": "completed"})


@pytest.mark.parametrize(
    ("after", "phrase"),
    [
        (replace(BEFORE, epoch=0), "the epoch went from 1 back to 0"),
        (replace(BEFORE, batch=9), "the batch number went from 10 back to 9"),
        (replace(BEFORE, cursors={1: 4}), "the cursor of log 1 went from 5 back to 4"),
        (replace(BEFORE, cursors={}), "log 1 is gone"),
        (replace(BEFORE, ends={1: (8, 1)}), "log 1 had (9, 1)"),
        (replace(BEFORE, ends={1: (9, 0)}), "log 1 had (9, 1)"),
        (replace(BEFORE, states={"r": "running"}), "was completed and is running"),
        (replace(BEFORE, states={}), "was completed and is None"),
    ],
)
def test_what_was_final_does_not_change(after: Snapshot, phrase: str) -> None:
    assert compare(BEFORE, BEFORE) == []
    assert any(phrase in objection for objection in compare(BEFORE, after))


@pytest.mark.parametrize(
    ("seen", "phrase"),
    [
        (replace(BEFORE, cursors={1: 8}), "completed with 8 of 9 committed"),
        (replace(BEFORE, cursors={1: 9}, ends={1: (9, 0)}), "sealed: 0"),
        (replace(BEFORE, cursors={1: 10}), "committed 10 of 9"),
    ],
)
def test_done_only_when_the_ledger_says_so(seen: Snapshot, phrase: str) -> None:
    assert any(phrase in objection for objection in consistent(seen))
    assert consistent(replace(BEFORE, cursors={1: 9})) == []


def test_a_failed_worker_needs_a_fault_that_explains_it() -> None:
    faults = [Window(200.0, 205.0, ""), Window(100.0, 110.0, "worker-1"), Window(300.0, 310.0, None)]
    explained = [(105.0, "worker-1", "a"), (112.0, "worker-1", "a"), (203.0, "worker-2", "b")]
    assert unexplained(explained, faults, set(), 5.0) == []
    alone = [(105.0, "worker-2", "b"), (116.0, "worker-1", "a"), (99.0, "worker-1", "a"), (305.0, "worker-1", "a")]
    assert len(unexplained(alone, faults, set(), 5.0)) == 4
    assert unexplained(alone, faults, {"a", "b"}, 5.0) == []  # killed: found dead whenever somebody looks


def test_a_fault_that_overlaps_others_is_over_when_they_are() -> None:
    """A worker is stopped, then the coordinator dies: the next one needs its time to find the worker silent."""
    failure = [(128.0, "worker-1", "a")]
    worker, coordinator = Window(100.0, 106.0, "worker-1"), Window(104.0, 125.0, None)
    assert unexplained(failure, [worker, coordinator], set(), 5.0) == []
    assert len(unexplained(failure, [worker, Window(112.0, 125.0, None)], set(), 5.0)) == 1
    assert len(unexplained(failure, [coordinator], set(), 5.0)) == 1


# ---- what the campaign reads while it strikes


async def test_reading_what_is_in_flight(made: Made) -> None:
    assert await in_flight(made.reader) == {}
    await made.reader.execute(
        "UPDATE run SET state = 'running' WHERE root_log = 1",
        "DELETE FROM result WHERE log = 1 AND seq IN (1, 3)",
        f"INSERT INTO assignment (batch, worker, n, keys) VALUES (9, 'w1', 2, {blob(pack(1, [0, 1, 3], 1))})",
    )
    # Row 0 has a result, and attempt 1 of row 3 was lost: w2 has its second.
    assert await in_flight(made.reader) == {"w1": {(1, 1)}, "w2": {(1, 3)}}
    assert await without_result(made.reader, {(1, 0), (1, 1), (2, 0)}) == {(1, 1)}
    seen = await snapshot(made.reader)
    assert seen is not None and (seen.epoch, seen.address, seen.states[ORDERED]) == (1, "there:1", "running")
    assert seen.cursors == {1: 4, 2: 4} and seen.committed == 8


def test_packed_keys_of_every_form() -> None:
    head = struct.Struct("<QIBB")
    packed = head.pack(5, 3, 0, 0) + struct.pack("<QQ", 10, 2)
    packed += head.pack(6, 2, 1, 1) + struct.pack("<QQ", 4, 9) + bytes([1, 3])
    packed += head.pack(7, 2, 1, 2) + struct.pack("<QQQQ", 1, 2, 300, 301)
    assert unpack_keys(packed) == [
        (5, 10, 2), (5, 11, 2), (5, 12, 2), (6, 4, 1), (6, 9, 3), (7, 1, 300), (7, 2, 301),
    ]  # fmt: skip


def test_exclusive_rows_overlap_only_where_a_whole_worker_stands_still() -> None:
    def at(seconds: float) -> list[Effect]:
        return [Effect("start", 3, 1, 90.0), Effect("beside", 3, 2, seconds)]

    whole = Struck(1, "worker stopped", at=1100.0, held_s=6.0, effect=FROZEN)
    daemon = Struck(2, "worker stopped", at=1100.0, held_s=6.0, effect="its daemon stopped, its processes went on")
    said = ["attempt 2 of exclusive row 3 began while another of it still ran"]
    assert overlaps(at(103.0), [whole, daemon], 1000.0) == []
    assert overlaps(at(103.0), [daemon], 1000.0) == said
    assert overlaps(at(99.0), [whole], 1000.0) == said
    assert overlaps(at(106.0 + THAW_S + 0.1), [whole], 1000.0) == said
    assert overlaps([Effect("start", 3, 1, 90.0), Effect("start", 3, 2, 95.0)], [], 1000.0) == [], "killed: no end"
