"""The log of a terminal: a sentence for every event, and none of them over and over."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import string
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import structlog
from rollout.config.logging import configure
from rollout.config.pace import FORGET_S, Pace
from rollout.config.sentences import SENTENCES, duration, sentence_of, size
from rollout.config.settings import LoggingSection
from rollout.config.terminal import Terminal
from rollout.model import events as names

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common/rollout", "coordinator/rollout_coordinator", "worker/rollout_worker")
DAY_LOG = Path(__file__).parent / "golden" / "day.jsonl"
MADE_UP = {f"run_{state}" for state in ("completed", "failed", "killed", "resumed", "continued")}
"""Events whose names are put together where they are emitted."""
RUN, ONE, TWO = "01M8DRKDWQHJH10XCQ7C0EKZ52", "01M8DRKDWQHJH10XCQ7CAAAAAA", "01M8DRKDWQHJH10XCQ7CBBBBBB"


def emitted() -> Iterator[tuple[str, str]]:
    """(event, where) of every call that logs one by a name that stands there."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and node.args and (event := _event(node)):
                    yield event, f"{path.relative_to(ROOT)}:{node.lineno}"


def _event(call: ast.Call) -> str:
    function, first = call.func, call.args[0]
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    on = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
    logs = on in ("log", "_log") and called in ("debug", "info", "warning", "error", "critical", "exception")
    if called == "_emit" and len(call.args) > 1:
        first = call.args[1]
    elif not logs and called != "Emit":
        return ""
    if isinstance(first, ast.Constant):
        return first.value if isinstance(first.value, str) and " " not in first.value else ""
    constant = first.attr if isinstance(first, ast.Attribute) else getattr(first, "id", "")
    return getattr(names, constant, "") if constant.isupper() else ""


def test_every_event_has_its_sentence() -> None:
    found = dict(emitted())
    assert {event: where for event, where in found.items() if event not in SENTENCES} == {}
    stable = {value for name, value in vars(names).items() if name.isupper()}
    assert (MADE_UP | stable) <= set(SENTENCES)


def test_sentences_are_well_made() -> None:
    for event, sentence in SENTENCES.items():
        assert sentence.text.count("[") == sentence.text.count("]"), event
        list(string.Formatter().parse(sentence.text))
        assert not sentence.text.endswith("."), event
        assert set(sentence.ends) <= set(SENTENCES), event


@pytest.mark.parametrize(
    ("event", "fields", "said"),
    [
        ("worker_failed", {"worker": ONE, "reason": "silent", "items": 0}, "worker 7CAAAAAA is lost: silent"),
        ("run_killed", {"run_id": RUN, "reason": "", "done": 1, "failed": 0}, "run 7C0EKZ52 was killed; 1 item done"),
        ("run_completed", {"run_id": RUN, "items": 2, "done": 2}, "run 7C0EKZ52 is complete: 2 of 2 items done"),
        (
            "run_completed",
            {"run_id": RUN, "items": 4, "done": 1, "failed": 3, "most_common": "no text", "most_common_count": 2},
            "run 7C0EKZ52 is complete: 1 of 4 items done, 3 failed; `rollout run items 7C0EKZ52 --failed` lists them; 2 "
            "of them like this: no text",
        ),
        (
            "worker_reconciled",
            {"worker": ONE, "host_name": "gpu-1", "kept": 0, "resend": 2, "accepted": 0, "dropped": 0, "repended": 0},
            "worker 7CAAAAAA on gpu-1 is connected again; it sends 2 results again, without computing anything again",
        ),
        (
            "worker_ready",
            {"worker": ONE, "host_name": "gpu-1", "address": "10.0.0.2", "replaces": TWO},
            "worker 7CAAAAAA on gpu-1 (10.0.0.2) is ready; it takes the place of worker 7CBBBBBB, which was lost",
        ),
        ("ledger_replayed", {"runs": 0, "open_attempts": 0, "seconds": 0.1}, ""),
        ("ledger_replayed", {"runs": 1, "open_attempts": 0}, "took up 1 unfinished run from the database"),
        ("predecessor_stopped", {"address": "h:1"}, "the coordinator that led before, at h:1, was stopped in order"),
        ("storage_full", {"error": "{no} [room]", "action": "x"}, "the database cannot grow: {no} [room]; x"),
        ("child_output", {"child": 3, "text": RUN}, f"process 3: {RUN}"),
        ("plugin_output", {"plugin": "p", "line": "x"}, "plugin p: x"),
        (
            "work_stolen",
            {"thief": ONE, "victim": TWO, "count": 1},
            "worker 7CAAAAAA had nothing left to start and takes 1 unstarted item from worker 7CBBBBBB",
        ),
    ],
)
def test_what_is_filled_in(event: str, fields: dict[str, object], said: str) -> None:
    assert sentence_of(event, fields) == said


def test_fields_of_sentences_are_fields_that_are_logged() -> None:
    logged: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.keyword) and node.arg:
                    logged.add(node.arg)
                elif isinstance(node, ast.Dict):
                    logged |= {key.value for key in node.keys if isinstance(key, ast.Constant)}  # pyright: ignore
                elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                    logged.add(str(node.slice.value))
    used = {
        (event, field)
        for event, sentence in SENTENCES.items()
        for _, field, _, _ in string.Formatter().parse(sentence.text)
        if field
    }
    assert {(event, field) for event, field in used if field not in logged} == set()


def test_lengths_and_sizes() -> None:
    assert [duration(s) for s in (0.4, 7, 25, 200, 7500)] == ["0.4 s", "7 s", "25 s", "3 min", "2 h 5 min"]
    assert [size(n) for n in (812, 5 << 20, 3 << 40)] == ["812 bytes", "5.0 MiB", "3072.0 GiB"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_goes_on_is_told_at_growing_intervals() -> None:
    clock = Clock()
    pace = Pace(clock)
    told: list[tuple[float, int]] = []
    for second in range(600):
        clock.now = second
        if pace.tell("x") is not None:
            told.append((second, 1))
    assert [second for second, _ in told] == [0, 20, 80, 260]
    assert pace.end("x") == 599
    assert pace.end("x") is None
    assert pace.tell("x") == (0, 1)
    clock.now += FORGET_S + 1
    assert pace.tell("x") == (0, 1), "after a silence it is something new"


DAY = """\
Friday 2026-01-02
09:00:00  ready: the coordinator at 10.0.0.1:50051 leads the cluster; new hosts join at 10.0.0.1:50052
09:00:00  worker 7CAAAAAA is ready
09:00:00  worker 7CBBBBBB is ready
09:00:00  run 7C0EKZ52 nightly (infer) was submitted
09:10:00  warning: worker 7CBBBBBB is lost: it was silent for 6 s; the 12 items given to it go to other workers
09:20:00  warning: the database does not answer: connection refused; next try in 1 s
09:20:20  warning: still, for 20 s (21 times): the database does not answer: connection refused; next try in 1 s
09:21:00  took up 1 unfinished run from the database; 3 items were at workers, who are expected to connect again, after 60 s
09:30:00  process 2: Loading weights
09:30:20  still, for 20 s (21 times): process 2: Loading weights
09:40:00  warning: grpc._plugin: channel is idle
09:40:00  some future event, what=this
Saturday 2026-01-03
00:00:01  run 7C0EKZ52 is complete: 998 of 1000 items done, 2 failed; `rollout run items 7C0EKZ52 --failed` lists them
"""


def test_the_log_of_a_day() -> None:
    clock, lines = Clock(), list[str]()
    midnight = datetime(2026, 1, 2, 9).timestamp()
    terminal = Terminal(colors=False, clock=clock, local=lambda: datetime.fromtimestamp(midnight + clock.now))

    def log(at: float, event: str, level: str = "info", **fields: object) -> None:
        clock.now = at
        line = terminal(None, level, {"event": event, "level": level, "timestamp": "2026-01-02T09:00:00Z", **fields})
        lines.extend([line] if line is not None else [])

    log(0, "coordinator_ready", addr="10.0.0.1:50051", join_addr="10.0.0.1:50052", objects_addr="x", epoch=1)
    for worker in (ONE, TWO):
        log(0, "worker_heartbeat", worker=worker)
        log(0, "worker_ready", worker=worker, host="H", state="ready")
    log(0, "run_submitted", run_id=RUN, workload="infer", name="nightly")
    log(600, "worker_failed", "warning", worker=TWO, reason="it was silent for 6 s", items=12)
    for second in range(30):
        log(1200 + second, "ledger_unreachable", "warning", error="connection refused", retry_in_s=1.0)
    log(1260, "ledger_replayed", runs=1, open_attempts=3, seconds=0.2)
    for second in range(30):
        log(1800 + second, "child_output", child=2, pid=7, worker=ONE, text="Loading weights")
    for _ in range(5):
        log(2400, "channel is idle", "warning", logger="grpc._plugin")
    log(2400, "some_future_event", what="this")
    log(54001, "run_completed", run_id=RUN, reason="", items=1000, done=998, failed=2)
    assert "\n".join(lines) + "\n" == DAY


def test_the_log_of_a_day_with_two_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a coordinator logged on which a worker and then the coordinator itself were killed, its times and addresses
    stretched to a day and some machines, and what of it a person sees. `REWRITE_GOLDEN=1` writes what is said now."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    clock, said = Clock(), ""
    at = datetime(2026, 1, 1)
    terminal = Terminal(colors=False, clock=clock, local=lambda: at)
    for line in DAY_LOG.read_text().splitlines():
        event = json.loads(line)
        at = datetime.fromisoformat(event["timestamp"])
        clock.now = at.timestamp()
        if told := terminal(None, event["level"], event):
            said += f"{told}\n"
    golden = DAY_LOG.with_suffix(".txt")
    if os.environ.get("REWRITE_GOLDEN"):
        golden.write_text(said)
    assert said == golden.read_text()
    assert {json.loads(line)["event"] for line in DAY_LOG.read_text().splitlines()} <= {
        event for event, _ in emitted()
    } | MADE_UP
    monkeypatch.undo()
    time.tzset()


def test_what_is_over_is_told_anew_when_it_comes_again() -> None:
    clock = Clock()
    terminal = Terminal(colors=False, clock=clock, local=lambda: datetime(2026, 1, 2, 9))
    trouble = {"event": "storage_unavailable", "level": "error", "error": "x", "action": "y"}
    assert terminal(None, "error", dict(trouble)) is not None
    clock.now = 5
    assert terminal(None, "error", dict(trouble)) is None
    assert terminal(None, "info", {"event": "ledger_replayed", "runs": 0}) is None, "there is nothing to say"
    assert terminal(None, "error", dict(trouble)) == "09:00:00  error: the database does not answer: x; y"


def test_what_a_child_prints_does_not_steer_the_terminal() -> None:
    terminal = Terminal(colors=False, local=lambda: datetime(2026, 1, 2, 9))
    for text, said in (("\x1b[2Jgone", "\\x1b[2Jgone"), ("\r 0 %\r100 %\r", "100 %"), ("two\nlines", "two\nlines")):
        line = terminal(None, "info", {"event": "child_output", "child": 1, "text": text})
        assert line is not None and line.removeprefix("Friday 2026-01-02\n") == f"09:00:00  process 1: {said}"


def test_a_line_that_a_librarys_own_handler_prints_comes_once(capfd: pytest.CaptureFixture[str]) -> None:
    out, library = io.StringIO(), logging.getLogger("chatty")
    handler = logging.StreamHandler()
    library.addHandler(handler)
    handlers = list(logging.root.handlers)
    try:
        configure(LoggingSection(), stream=out)
        logging.getLogger("chatty.http").warning("retrying")
        logging.getLogger("quiet").warning("lost")
        assert [line["event"] for line in map(json.loads, out.getvalue().splitlines())] == ["lost"]
        assert "retrying" in capfd.readouterr().err
    finally:
        library.removeHandler(handler)
        logging.root.handlers[:] = handlers
        structlog.reset_defaults()


def test_a_person_gets_sentences_and_a_program_gets_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    for format, has in (("console", "  worker 7CAAAAAA left: drained\n"), ("json", f'"worker": "{ONE}"')):
        out = io.StringIO()
        root = logging.getLogger()
        monkeypatch.setattr(root, "handlers", list(root.handlers))
        configure(LoggingSection.model_validate({"format": format}), stream=out)
        for _ in range(2):
            structlog.get_logger().info("worker_deregistered", worker=ONE, host="H", reason="drained")
            logging.getLogger("grpc").warning("again")
        structlog.reset_defaults()
        assert out.getvalue().count(has) == 2
        assert out.getvalue().count("again") == 1, "a library's line is said once, and then counted"
