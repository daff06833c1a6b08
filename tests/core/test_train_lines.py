"""What a training run leaves in its files, though the client is killed at any moment."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rollout.cli.collecting import CollectedRun
from rollout.cli.progress import PlainDisplay, Snapshot, TerminalDisplay, details
from rollout.cli.run_rows import InputRows
from rollout.cli.show import run_json
from rollout.cli.show_run import in_a_line
from rollout.model.item import Failure, Outcome
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.collector import Collector
from rollout.workloads.commit import CommitEntry
from rollout.workloads.output import OutputDirectory
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Checked
from rollout.workloads.resume import failed_without_results
from rollout.workloads.train.encode import FAULTS
from rollout.workloads.train.lines import TrainWriter
from rollout.workloads.train.report import Report
from rollout.workloads.train.segment import Result, Segment
from rollout.workloads.train.workload import Train, may_be_fewer

RUN = "01J00000000000000000000000"
CONFIG = {"algorithm": {"kind": "sft"}, "model": {"uri": "tiny"}}
REPORT = Report(dict.fromkeys(FAULTS, "error"), rows=3, kept=3).to_json()
NAN = Failure("loss_not_finite", "the loss is nan at step 5, which trains on the rows 7, 9: lower optimizer.lr", False)


def entry(seq: int, result: Result | None, segment: Segment) -> CommitEntry:
    outcome = Outcome.DONE if result is not None else Outcome.FAILED
    data = result.encode() if result is not None else b""
    failure = NAN if result is None else None
    return CommitEntry(seq, seq, 1, outcome, data, segment.encode(), b"i" * 32, failure, 5, 5, "W", 0, 16)


def log() -> list[CommitEntry]:
    """Two segments of two steps, the second on another host, and a third that failed."""
    metrics = [{"step": n + 1, "loss": 1.0 / (n + 1)} for n in range(4)]
    first = Result(step=2, snapshot="aa", metrics=metrics[:2], fingerprint={"device": "A", "threads": 1}, weights="w1")
    evaluations = {"best_evaluation": {"step": 2, "loss": 0.5}, "last_evaluation": {"step": 4, "loss": 0.75}}
    second = Result(step=4, snapshot="bb", metrics=metrics[2:], fingerprint={"device": "B", "threads": 1}, weights="w2")
    second.stopping = evaluations
    return [
        entry(0, Result(report={"dataset": REPORT}), Segment("prepare")),
        entry(1, first, Segment("segment", 0, 2)),
        entry(2, second, Segment("segment", 2, 2)),
        entry(3, None, Segment("segment", 4, 2)),
    ]


def collect(place: Path, upto: int, *, finish: bool = False) -> dict[str, Any]:
    """A client that goes on where the last one was killed, as far as `upto`."""
    with OutputDirectory.open(place) as output:
        collector = Collector(output, RUN, TrainWriter(CONFIG), total=6, unit="segments", measure="tokens")
        try:
            collector.add(log()[collector.cursor : upto])
            collector.flush()
            return collector.finish("failed", reason="end_run: row 4 is failed") if finish else {}
        finally:
            collector.close()


@pytest.mark.parametrize("killed_at", range(5))
def test_a_client_that_was_killed_anywhere_leaves_the_same_files(tmp_path: Path, killed_at: int) -> None:
    whole = collect(tmp_path / "whole", 4, finish=True)
    collect(tmp_path / "killed", killed_at)
    assert collect(tmp_path / "killed", 4, finish=True) == whole
    for name in ("metrics.jsonl", "errors.jsonl", "data-report.json", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_failed_run_says_why_keeps_its_metrics_and_names_what_it_can_go_on_from(tmp_path: Path) -> None:
    summary = collect(tmp_path, 4, finish=True)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert summary["reason"] == f"after step 4: {NAN.message}"
    assert summary["failure"] == {"code": NAN.code, "message": NAN.message, "after_step": 4}
    assert (summary["steps"], summary["final_snapshot"], summary["weights_hash"]) == (4, "bb", "w2")
    assert summary["fingerprint_changes"] == [{"after_step": 2, "changed": {"device": ["A", "B"]}}]
    (line,) = map(json.loads, (tmp_path / "errors.jsonl").read_text().splitlines())
    assert (line["first_step"], line["code"], line["message"], line["attempts"]) == (5, NAN.code, NAN.message, 1)
    train = Train()
    said = train.failed(summary).recovery_hint
    assert "the last good snapshot is bb of step 4" in said and "`rollout train fork 00000000 --step 4 " in said
    unharmed = {**summary, "segments": {**summary["segments"], "failed": 0}}
    assert "the same command goes on" in train.failed(unharmed).recovery_hint, "no worker could start it"


def test_steps_of_a_segment_that_failed_are_kept_and_said_to_be_not_committed(tmp_path: Path) -> None:
    collect(tmp_path / "before", 4)
    left = Result(step=6, metrics=[{"step": 5, "loss": 3.0}, {"step": 6, "loss": 9.5}])
    left.evaluations = [{"step": 6, "loss": 9.0}]
    for place, evidence in (("with", left.encode()), ("forged", b"{}]")):
        with OutputDirectory.open(tmp_path / place) as output:
            collector = Collector(output, RUN, TrainWriter(CONFIG), total=6, unit="segments", measure="tokens")
            collector.add([*log()[:3], replace(log()[3], data=evidence)])
            summary = collector.finish("failed")
            collector.close()
        assert summary["steps"] == 4 and summary["failure"]["code"] == "loss_not_finite"
    before = (tmp_path / "before/metrics.jsonl").read_bytes()
    assert (tmp_path / "forged/metrics.jsonl").read_bytes() == before
    metrics = (tmp_path / "with/metrics.jsonl").read_bytes()
    assert metrics.startswith(before), "the committed lines are the same bytes"
    assert [json.loads(line) for line in metrics[len(before) :].splitlines()] == [
        {"step": 5, "loss": 3.0, "committed": False},
        {"step": 6, "loss": 9.5, "committed": False},
    ]
    evaluation = json.loads((tmp_path / "with/eval.jsonl").read_text())
    assert evaluation == {"step": 6, "loss": 9.0, "committed": False}


def test_a_run_that_failed_before_it_had_a_snapshot_is_replaced_by_the_same_command(tmp_path: Path) -> None:
    """Whatever was wrong, such as a device that is not there: it may be mended in the configuration."""
    summary, train = collect(tmp_path, 1, finish=True), Train()
    assert summary["segments"]["committed"] == 1 and summary["segments"]["failed"] == 0
    with OutputDirectory.open(tmp_path) as output:
        assert failed_without_results(train, output, RUN)
    assert "nothing is trained yet, and when the cause is mended, the same command starts another run" in (
        train.failed(summary).recovery_hint
    )
    collect(tmp_path / "later", 2, finish=True)
    with OutputDirectory.open(tmp_path / "later") as output:
        assert not failed_without_results(train, output, RUN), "it has a snapshot"


def test_what_a_run_came_to_names_its_last_and_its_best_evaluation(tmp_path: Path) -> None:
    summary = collect(tmp_path, 4, finish=True)
    assert summary["final_evaluation"] == {"step": 4, "loss": 0.75}
    assert summary["best_evaluation"] == {"step": 2, "loss": 0.5}
    assert ", eval loss 0.7500 at step 4, the best 0.5000 at step 2, snapshot bb" in Train().outcome(summary)
    assert "the best" not in Train().outcome({**summary, "best_evaluation": summary["final_evaluation"]})


def test_what_a_client_saved_without_what_the_writer_must_know_is_written_anew(tmp_path: Path) -> None:
    collect(tmp_path, 3)
    with OutputDirectory.open(tmp_path) as output:
        plain: Any = type("Plain", (), {"files": TrainWriter(CONFIG).files, "lines": lambda self, entry: ()})()
        collector = Collector(output, RUN, plain, total=6)
        assert collector.cursor == 0
        collector.close()


FIGURES = {"step": 36, "steps": 100, "loss": 0.5, "lr": 0.001, "grad_norm": 1.5, "tokens_per_s": 900.0, "eta_s": 64.0}
NOTE = "step 36/100 · loss 0.5000 · lr 0.001 · grad norm 1.5 · 900 tokens/s · ETA 1 min 4 s"
STATUS = pb.RunStatus(
    spec=pb.RunSpec(run_id=RUN, workload="train"), state="running", submitted=6, sealed=True, done=3, running=1,
    workers=1, note=NOTE, figures=json.dumps(FIGURES).encode(),
)  # fmt: skip


def test_how_far_a_segment_is_reaches_terminals_logs_and_programs() -> None:
    collector: Any = SimpleNamespace(cursor=3)
    nobody: Any = None
    rows = InputRows(Train(), Checked(config={}, total=6), {})
    run: Any = CollectedRun(Train(), nobody, "R", {}, rows, collector, nobody, OutputPlace(Path()))
    snapshot: Snapshot = run._snapshot(STATUS)
    assert FIGURES.items() <= snapshot.fields().items() and snapshot.fields()["segments"] == 6
    out = io.StringIO()
    PlainDisplay(out).progress(snapshot)
    assert out.getvalue() == f"36/100 steps (36.0 %), {NOTE.partition(' · ')[2]}\n"
    screen = io.StringIO()
    display = TerminalDisplay(Console(file=screen, force_terminal=True, width=160))
    display.progress(snapshot)
    display.close()
    assert "36/100" in screen.getvalue() and "loss 0.5000" in screen.getvalue()
    assert len(details(snapshot, 40)) == 40, "a narrow terminal cuts it"
    assert NOTE in in_a_line(STATUS)
    shown = run_json(STATUS)
    assert (shown["note"], shown["figures"]) == (NOTE, FIGURES)
    assert run_json(pb.RunStatus(figures=b"[1]"))["figures"] == {} == run_json(pb.RunStatus(figures=b"{"))["figures"]


def test_a_run_with_other_settings_names_what_goes_on_with_its_state() -> None:
    train = Train()
    said = train.another_run("TNX5QG61", ["algorithm.sft.budget.max_steps: 2 -> 4", "steps: 2 -> 4"])
    assert "rollout train fork TNX5QG61 --step" in said and "--resume snapshot:" in said
    assert "fork" not in train.another_run("TNX5QG61", ["input: other rows", "steps: 2 -> 4"])


@pytest.mark.parametrize(
    ("settings", "fewer"),
    [
        ({"budget": {"epochs": 1}, "rows": {}, "packing": {"kind": "best_fit"}}, True),
        ({"budget": {"epochs": 1}, "rows": {"too_long": "drop"}, "packing": None}, True),
        ({"budget": {"epochs": 1}, "rows": {"too_long": "error"}, "packing": {"kind": "off"}}, False),
        ({"budget": {"max_steps": 9}, "rows": {"too_long": "drop"}, "packing": {"kind": "best_fit"}}, False),
    ],
)
def test_segments_of_rows_that_are_packed_or_dropped_are_announced_as_a_bound(settings: Any, fewer: bool) -> None:
    assert may_be_fewer({"algorithm": {"settings": settings}}) is fewer
