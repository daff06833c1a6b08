"""What `rollout run show`, `run items`, `item show` and `workers show` print."""

from __future__ import annotations

import io
import json
import sys
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console
from rollout.cli import show, show_items, show_run, show_worker, words
from rollout.cli.progress import PlainDisplay, Snapshot, TerminalDisplay, details, eta
from rollout.cli.rows import place_of
from rollout.model.counts import of_unit
from rollout.model.errors import ConfigError
from rollout.wire.v1 import common_pb2
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.digest import Text

Capture = pytest.CaptureFixture[str]


def test_what_a_run_waits_for(capsys: Capture) -> None:
    waits = [
        pb.Wait(reason="executor", message="no worker hosts the executor rank", items=12, impossible=True),
        pb.Wait(reason="caps", message="the lane slow is full", items=3),
    ]
    status = pb.RunStatus(state="running", waits=waits)
    assert show.run_json(status)["waits"] == [
        {"reason": "executor", "message": "no worker hosts the executor rank", "items": 12, "impossible": True},
        {"reason": "caps", "message": "the lane slow is full", "items": 3, "impossible": False},
    ]
    show_run.print_run(status)
    out = capsys.readouterr().out
    assert "12 items: no worker hosts the executor rank (impossible with the workers that are connected)" in out
    assert "3 items: the lane slow is full" in out
    show_run.print_run(pb.RunStatus(state="running"))
    assert "waits" not in capsys.readouterr().out


def test_the_frames_of_why_a_run_failed_follow_it_unless_its_causes_have_them(capsys: Capture) -> None:
    reason = 'no worker can: m:f failed\n  File "m.py", line 1'
    show_run.print_run(pb.RunStatus(state="failed", reason=reason))
    assert "failed (no worker can: m:f failed)\n" in (out := capsys.readouterr().out) and out.count("m.py") == 1
    cause = pb.Cause(executor="map", message='m:f failed\n  File "m.py", line 1', workers=["W"], times=1)
    show_run.print_run(pb.RunStatus(state="failed", reason=reason, causes=[cause]))
    assert "W cannot start the function: m:f failed" in (out := capsys.readouterr().out) and out.count("m.py") == 1


def status(**more: Any) -> pb.RunStatus:
    now = int(time.time() * 1000)
    fields: dict[str, Any] = {
        "state": "running", "sealed": True, "submitted": 2000, "done": 1000, "failed": 20, "in_flight": 30,
        "running": 16, "workers": 2, "attempts": 1052, "retried": 32, "worker_lost": 16, "rate": 98.0,
        "created_ms": now - 61_000,
    }  # fmt: skip
    fields["spec"] = pb.RunSpec(run_id="R", workload="map", name="mine")
    return pb.RunStatus(**(fields | more))


def test_how_far_a_run_is_in_numbers_that_a_person_reads(capsys: Capture) -> None:
    failure = pb.RunFailure(seq=42, attempt=2, code="timeout", message="too\nslow", worker="W", host="h1", at_ms=1)
    reply = pb.RunReply(
        status=status(),
        workers=[pb.RunWorker(incarnation="W", host="h1", in_flight=30, running=16)],
        failures=[failure, pb.RunFailure(seq=7, code="bad", final=True, at_ms=1)],
    )
    show_run.print_description(reply)
    out = capsys.readouterr().out
    assert "run R mine: map, running" in out
    assert "1,020 of 2,000 rows: 1,000 done, 20 failed, 16 running, 14 with workers, not begun, 950 pending" in out
    assert show_run.in_a_line(status()) == (
        "running: 1,000 done, 20 failed of 2,000, 16 running, 98.0 rows/s, 2 workers, about 0:10 left"
    )
    assert show_run.in_a_line(status(state="killed")) == "killed: 1,000 done, 20 failed of 2,000"
    assert "98.0 rows/s, 2 workers, about 0:10 left" in out and "running for 1:01" in out
    assert "1,052 attempts ended, 32 came to nothing and were repeated, 16 were lost with the worker" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("43 ") and line.endswith("timeout W h1 tried again too") for line in lines)
    assert any(line.startswith("8 ") and "failed for good" in line for line in lines)
    found = show.description_json(reply)
    assert (found["per_s"], found["eta_s"], found["pending"]) == (98.0, 10.0, 950)
    assert found["on"] == [{"worker_id": "W", "host": "h1", "in_flight": 30, "running": 16}]
    assert [(one["row"], one["code"], one["final"]) for one in found["failures"]] == [
        (43, "timeout", False),
        (8, "bad", True),
    ]


@pytest.mark.parametrize(
    "more", [{"workers": 0}, {"state": "paused"}, {"state": "killed"}, {"rate": 0.0}, {"sealed": False}]
)
def test_no_end_is_told_where_nobody_works_or_more_may_come(capsys: Capture, more: dict[str, object]) -> None:
    assert show.eta_s(status(**more)) is None
    show_run.print_run(status(**more))
    assert "left" not in capsys.readouterr().out


def test_what_was_cut_off_by_the_end_of_a_run_was_not_repeated(capsys: Capture) -> None:
    show_run.print_run(status(state="killed", retried=1, worker_lost=1))
    out = capsys.readouterr().out
    assert "1 came to nothing, 1 was lost" in out and "repeated" not in out


def test_one_is_no_plural(capsys: Capture) -> None:
    one = status(submitted=1, done=0, failed=0, running=0, in_flight=0, attempts=1, retried=0, worker_lost=0)
    one.waits.add(reason="no_workers", message="m", items=1)
    show_run.print_run(one)
    out = capsys.readouterr().out
    assert "0 of 1 row:" in out and "1 attempt ended" in out and "1 item: m" in out
    assert (of_unit(1, "rows"), of_unit(1200, "trials")) == ("1 row", "1,200 trials")


def test_progress_says_in_what_state_a_run_is() -> None:
    def said(state: str, workers: int = 2, waits: str = "") -> str:
        left = eta(50, 5.0, workers=workers, state=state)
        return details(Snapshot(100, 100, 50, 0, 50, 3, workers, per_s=5.0, eta_s=left, state=state, waits=waits))

    assert said("running") == "5.0 rows/s, ETA 0:10, 0 failed, 2 workers"
    assert said("running", 0) == "5.0 rows/s, 0 failed, no workers"
    assert said("running", 0, "x is silent") == "5.0 rows/s, 0 failed, no workers, waits: x is silent"
    assert said("pausing") == "pausing, 3 still running, 5.0 rows/s, 0 failed, 2 workers"
    assert said("paused", 0) == "paused, 0 failed"
    assert said("killed") == "killed, 0 failed"


def test_an_intake_without_rows_is_not_short_of_workers() -> None:
    def said(done: int) -> str:
        return details(Snapshot(50, 50, done, 0, done, 0, 0, state="running", intake="receiving", waiting=3))

    assert said(50) == "3 waiting in the queue, 0.0 rows/s, 0 failed"
    assert said(49) == "3 waiting in the queue, 0.0 rows/s, 0 failed, no workers"


def test_rows_that_cannot_be_used_are_told_apart_from_those_that_failed(capsys: Capture) -> None:
    snapshot = Snapshot(2000, 2000, 1000, 20, 1020, 3, 2, per_s=5.0, invalid=18, state="running")
    assert details(snapshot) == "5.0 rows/s, 2 failed, 18 left out as invalid, 2 workers"
    assert (snapshot.fields()["failed"], snapshot.fields()["invalid"]) == (20, 18)
    show_run.print_run(status(invalid=18))
    assert "1,000 done, 2 failed, 18 left out as invalid, 16 running" in capsys.readouterr().out
    show.print_runs([status(invalid=18), status(failed=4)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[3:6] for row in rows] == [["1,000", "2", "18"], ["1,000", "4", "0"]]
    assert show.run_json(status(invalid=18))["invalid"] == 18


@pytest.mark.parametrize(
    ("width", "shown"),
    [(100, "177.6 rows/s, 888 tokens/s, ETA 0:02, 7 failed, 2 workers"),
     (80, "177.6 rows/s, ETA 0:02, 7 failed, 2 workers"), (60, "177.6 rows/s, ETA 0:02, 7 failed"), (40, "ETA 0:02")],
)  # fmt: skip
def test_a_narrow_terminal_cuts_no_count(width: int, shown: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    display = TerminalDisplay(console)
    with console.capture() as captured:
        display.step("uploading code: 1 KiB")
        display.progress(Snapshot(1_000_000, 1_000_000, 600_000, 7, 0, 64, 2, 177.6, 888.0, 2.0, measure="tokens"))
        display.close()
    assert "0/?" not in captured.get()
    last = [line for line in captured.get().splitlines() if "rows " in line][-1]
    assert last.rstrip().endswith(f" 600007/1000000 {shown}") and len(last.rpartition("\x1b[2K")[2]) <= width


def item(**more: Any) -> pb.ItemStatus:
    fields: dict[str, Any] = {"seq": 42, "id": b"\x01", "state": "done", "attempts": 2, "worker": "W"}
    return pb.ItemStatus(**(fields | more))


def test_rows_are_counted_from_one(capsys: Capture) -> None:
    page = pb.ItemsReply(items=[item(code="bad", message="no\nprompt", state="failed")], hosts={"W": "h1"})
    show_items.ItemLines().add(page)
    assert capsys.readouterr().out.splitlines()[1].split() == ["43", "failed", "2", "0", "ms", "W", "h1", "bad:", "no"]
    assert show_items.item_json(page.items[0], hosts=page.hosts)["row"] == 43
    assert show_items.item_json(page.items[0], [6, 0])["row"] == "7.1.43"
    assert place_of("43.2") == [42, 1]
    for text in ("0", "1.0", "-1", "x", "", "1.", "9" * 19, "\u0663"):
        with pytest.raises(ConfigError, match="rows are counted from 1"):
            place_of(text)


def test_a_list_of_rows_fits_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    page = pb.ItemsReply(items=[item(state="failed", code="bad", message="x" * 90, at_ms=int(time.time() * 1000))])
    show_items.ItemLines().add(page)
    assert capsys.readouterr().out.splitlines()[1].endswith(f"  bad: {'x' * 90}")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show_items.ItemLines().add(page)
    head, row = capsys.readouterr().out.splitlines()
    assert len(row) == 80 and row.endswith("x…") and row.index("bad: ") == head.index("cause") < 60


def test_a_row_in_full(capsys: Capture) -> None:
    attempts = [
        pb.AttemptStatus(attempt=1, worker="W", host="h1", ended_ms=5, ending="released", code="worker_failed"),
        pb.AttemptStatus(
            attempt=2, worker="W", began_ms=5, ended_ms=1005, ending="timeout", code="timeout", message="a\nb"
        ),
        pb.AttemptStatus(attempt=3, worker="V", began_ms=5, ended_ms=2005, ending="done"),
    ]
    reply = pb.ItemReply(item=item(), has_result=True, attempts=attempts, children=3, children_final=1)
    whole = show_items.read_item(status(), [42], reply, b'{"text": "' + b"x" * 3000 + b'"}', b'{"n": 1}')
    show_items.print_item(whole, full=False)
    out = capsys.readouterr().out
    assert "row 43 of run R: done, 2 attempts" in out and "characters more: --full shows them" in out
    assert "it was given back before it began: worker_failed" in out and "it took too long: timeout: a" in out
    assert "1 of 3 child items are final: rollout run items R --children-of 43" in out
    show_items.print_item(whole, full=True)
    assert "x" * 3000 in capsys.readouterr().out
    more = [Text("prompt, 2 tokens", "<s>hello", "rendered", {"limit": 9})]
    show_items.print_item(whole, more, full=False)
    assert "prompt, 2 tokens\n<s>hello\n" in capsys.readouterr().out
    found = show_items.item_in_full(whole, more)
    assert found["rendered"] == {"limit": 9}
    assert found["output"] == {"n": 1} and found["children"] == {"count": 3, "final": 1}
    assert found["history"][0]["began_at"] is None
    json.dumps(found)


def test_a_run_that_carries_on_another_says_which_rows_it_has() -> None:
    config = json.dumps({"carried": {"run_id": "01K9ABCDEFGHJKMNPQRSTVWXYZ"}}).encode()
    spec = pb.RunSpec(run_id="R", workload="infer", config=config)
    note = show_items.carried_note(pb.RunStatus(spec=spec, submitted=3))
    assert "3 rows" in note and "STVWXYZ" in note
    assert show_items.carried_note(status()) == ""


def test_what_a_function_raised_does_not_steer_the_terminal(capsys: Capture) -> None:
    red = "\x1b[31mred \x9b2J"
    failed = item(code=f"{red}\n     43  done", message=red, state="failed")
    show_items.ItemLines().add(pb.ItemsReply(items=[failed]))
    assert len(capsys.readouterr().out.splitlines()) == 2, "the heads and a row"
    attempt = pb.AttemptStatus(attempt=1, ending="failed", code=red, host=red, message=red)
    reply = pb.ItemReply(item=failed, attempts=[attempt])
    show_items.print_item(show_items.read_item(status(), [42], reply, json.dumps(red).encode(), b""), full=True)
    named = status(spec=pb.RunSpec(run_id="R", workload="map", name=f"{red} [bold]"), reason=red)
    show_run.print_description(
        pb.RunReply(status=named, failures=[pb.RunFailure(seq=7, code=red, host=red, message=red)])
    )
    show.print_runs([named])
    PlainDisplay(sys.stdout).note(red)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and "\\x1b[31mred \\x9b2J" in out and "[bold]" in out


@pytest.mark.parametrize(("payload", "shown"), [(b"plain", "plain"), (b"\xff", {"base64": "/w=="}), (b"3", 3)])
def test_an_input_that_is_no_json_is_shown_as_it_is(payload: bytes, shown: object) -> None:
    reply = pb.ItemReply(item=item(state="pending"))
    whole = show_items.read_item(status(), [42, 1], reply, payload, b"")
    assert whole.input == shown and whole.output is None


def test_a_worker_in_full(capsys: Capture) -> None:
    worker = pb.WorkerStatus(
        incarnation="W", state="ready", in_flight=3, running=1, done=1200, registered_ms=1, last_seen_s=0.4,
        inventory=common_pb2.Inventory(host="h1", capacity={"slots": 2, "gpus": 0, "memory_mib": 24105}, executors=["map"], version="1.2"),
        runs=[pb.WorkerRun(run_id="R", workload="map", in_flight=3, running=1)],
        held=[pb.HeldAttempt(run_id="R", place=[42], attempt=1, began_ms=5), pb.HeldAttempt(run_id="R", place=[6, 0])],
    )  # fmt: skip
    show_worker.print_worker(worker)
    out = capsys.readouterr().out
    assert "worker W on h1: ready" in out and "1 running, 3 held, 1,200 rows done" in out and "executors: map" in out
    assert "capacity: memory 24 GiB, slots 2\n" in out
    assert "rows, 2 of 3" in out and "7.1" in out and "not begun" in out
    assert [one["row"] for one in show.worker_detail_json(worker)["held"]] == ["43", "7.1"]


def test_times_and_numbers_are_short() -> None:
    assert [words.duration(s) for s in (0, 61, 3723, 200_000)] == ["0:00", "1:01", "1:02:03", "2 d 7 h"]
    assert [words.took(ms) for ms in (4, 1234, 125_000)] == ["4 ms", "1.2 s", "2:05"]
    assert [words.rate(r) for r in (0.0123, 7.25, 1230.4)] == ["0.012", "7.2", "1,230"]
    at = datetime(2026, 3, 4, 14, 3, 7).astimezone()
    stamp = int(at.timestamp() * 1000)
    assert words.when(stamp, at) == "14:03:07"
    assert words.when(stamp, at.replace(day=9)) == "Mar 4 14:03:07"
    assert words.when(stamp, at.replace(year=2027)) == "Mar 4, 2026, 14:03:07"
    assert words.when(0) == "" and words.first_line("\n a\nb") == "a" and len(words.first_line("x" * 999)) == 200
    assert show.timestamp(0) is None and show.timestamp(1) == datetime.fromtimestamp(0.001, UTC).strftime(
        "%Y-%m-%dT%H:%M:%S.001Z"
    )


def test_two_workers_of_one_host_are_told_apart(capsys: Capture) -> None:
    workers = [
        pb.WorkerStatus(incarnation=name, state="ready", inventory=common_pb2.Inventory(host="h1", pid=pid))
        for name, pid in (("A", 12), ("B", 34))
    ]
    show.print_workers(workers, "c:1")
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["A", "ready", "h1", "12"] in rows and ["B", "ready", "h1", "34"] in rows
    assert [show.worker_json(one)["pid"] for one in workers] == [12, 34]
