"""Traces across the death of a coordinator."""

from __future__ import annotations

from pathlib import Path

from rollout.telemetry.identity import LogTraces
from trace_collector import Collector
from worker_nodes import Nodes, collect, script, submit, until


async def test_the_next_coordinator_continues_the_traces(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    with Collector() as collector:
        nodes.env |= {"ROLLOUT_TELEMETRY__OTLP_ENDPOINT": collector.endpoint, "ROLLOUT_TELEMETRY__TRACE_RATIO": "1.0"}
        nodes.env["OTEL_BSP_SCHEDULE_DELAY"] = "100"
        try:
            first = nodes.coordinator()
            await first.event("coordinator_ready")
            await nodes.worker().event("worker_ready")
            async with await nodes.client() as runs:
                run_id = await submit(runs, [script({"until": str(tmp_path / "go")})])
                await until(lambda: "queue" in collector.traces().get(0, {}), "the span queue")
                first.kill()
                await nodes.coordinator().event("coordinator_ready", count=2)  # in the log of both
                (tmp_path / "go").touch()
                _, status = await collect(runs, run_id)
            names = {"queue", "attempt", "engine", "commit"}
            await until(lambda: set(collector.traces()[0]) == names, "all spans")
            expected, spans = LogTraces(run_id, status.root_log, 1.0), collector.traces()[0]
            assert {int.from_bytes(span.trace_id, "big") for span in spans.values()} == {expected.trace_id(0)}
            assert spans["attempt"].parent_span_id == spans["queue"].span_id
            assert spans["commit"].parent_span_id == spans["attempt"].span_id
        finally:
            nodes.close()
