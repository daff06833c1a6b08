"""Traces of items from real processes, at a collector that speaks OTLP/HTTP, and without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance_cli import ROLLOUT, Cli, Finished, until
from cluster import free_port
from rollout.telemetry.identity import LogTraces
from rollout.telemetry.spans import PARENTS
from trace_collector import Collector, attributes

MS = 1_000_000  # the coordinator's clock has milliseconds


@pytest.fixture
def collector(cli: Cli) -> Iterator[Collector]:
    with Collector() as found:
        cli.env["ROLLOUT_TELEMETRY__OTLP_ENDPOINT"] = found.endpoint
        yield found


def batch(cli: Cli, rows: int, ratio: float) -> Finished:
    cli.env["ROLLOUT_TELEMETRY__TRACE_RATIO"] = str(ratio)
    cli.rows(rows)
    done = cli.run("infer", "batch", "--config", str(cli.config()))
    assert done.code == 0, done
    assert [row["n"] for row in cli.completions()] == list(range(rows))
    return done


def test_an_item_has_five_spans_with_parents_and_times(cli: Cli, collector: Collector) -> None:
    batch(cli, 8, 1.0)
    until(lambda: len(collector.spans) >= 40, "all spans")
    services = {span.name: service for service, span in collector.spans}
    assert services == {
        "submit": "rollout", "queue": "rollout-coordinator", "commit": "rollout-coordinator",
        "attempt": "rollout-worker", "engine": "rollout-worker",
    }  # fmt: skip
    traces = collector.traces()
    assert sorted(traces) == list(range(8)) and len(collector.spans) == 40
    assert len({span.trace_id for spans in traces.values() for span in spans.values()}) == 8
    for spans in traces.values():
        for name, above in PARENTS.items():
            assert spans[name].parent_span_id == (spans[above].span_id if above else b"")
            assert spans[name].start_time_unix_nano <= spans[name].end_time_unix_nano
        submit, queue, attempt, engine, commit = (spans[name] for name in PARENTS)
        assert submit.start_time_unix_nano <= queue.start_time_unix_nano + MS
        assert queue.end_time_unix_nano <= attempt.start_time_unix_nano + MS
        assert attempt.start_time_unix_nano <= engine.start_time_unix_nano + MS
        assert engine.end_time_unix_nano <= attempt.end_time_unix_nano <= commit.end_time_unix_nano + MS
        assert attributes(commit)["rollout.outcome"] == "done" and attributes(engine)["rollout.units_out"] > 0


def test_the_sampled_items_have_all_their_spans(cli: Cli, collector: Collector) -> None:
    batch(cli, 200, 0.1)
    of = attributes(collector.spans[0][1])
    log = LogTraces(of["rollout.run_id"], of["rollout.log"], 0.1)
    expected = [seq for seq in range(200) if log.is_sampled(seq)]
    assert 18 <= len(expected) <= 22
    until(lambda: len(collector.spans) >= 5 * len(expected), "all spans")
    traces = collector.traces()
    assert sorted(traces) == expected and {tuple(sorted(s)) for s in traces.values()} == {tuple(sorted(PARENTS))}


def test_a_run_does_not_need_its_collector(cli: Cli) -> None:
    cli.env["ROLLOUT_TELEMETRY__OTLP_ENDPOINT"] = address = f"http://127.0.0.1:{free_port()}"
    assert batch(cli, 50, 1.0).err.count(address) == 1  # said once, not at every try


@pytest.mark.parametrize("program", ["rollout", "rollout-coordinator", "rollout-worker"])
def test_the_missing_package_is_named_before_anything_starts(cli: Cli, program: str) -> None:
    (cli.directory / "shadow" / "opentelemetry").mkdir(parents=True)
    (cli.directory / "shadow" / "opentelemetry" / "__init__.py").touch()
    cli.env |= {
        "PYTHONPATH": str(cli.directory / "shadow"),
        "ROLLOUT_TELEMETRY__OTLP_ENDPOINT": "http://127.0.0.1:4318",
    }
    cli.rows(1)
    (cli.directory / "coordinator.toml").touch()
    words = ["infer", "batch", "--config", str(cli.config())] if program == "rollout" else ["run"]
    process = cli.start(*words, program=str(Path(ROLLOUT).with_name(program)), together=True)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "pip install 'rollout-engine[otel]'" in out, out
    assert not (cli.directory / "data").exists() and not (cli.directory / "out").exists()
