"""The board and the alert rules of deploy/ over what a real coordinator and a real worker expose."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml
from cluster import free_port
from coordinator_places import inprocess
from prometheus_client.parser import text_string_to_metric_families
from rollout.client import Runs
from rollout.model.item import ItemSpec
from rollout.model.run import RunSpec
from test_coordinator_run import fetch
from ulid import ULID
from worker_nodes import Nodes, collect, script, submit

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RETRY = ItemSpec(max_attempts=2, retry_backoff_ms=1)
HTTP = '[http]\nlisten_addr = "127.0.0.1:0"\n'
TARGET = {"type": "object", "required": ["refId", "expr"], "properties": {"expr": {"type": "string", "minLength": 1}}}
PLACE = {"type": "object", "required": ["x", "y", "w", "h"], "additionalProperties": {"type": "integer", "minimum": 0}}
BOARD: dict[str, Any] = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "templating", "panels", "time"],
    "properties": {
        "panels": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "type", "title", "gridPos"],
                "properties": {
                    "type": {"enum": ["row", "stat", "timeseries"]},
                    "gridPos": PLACE,
                    "targets": {"type": "array", "minItems": 1, "items": TARGET},
                },
            },
        },
        "templating": {"type": "object", "required": ["list"]},
    },
}
RULE = {
    "type": "object",
    "required": ["alert", "expr", "labels", "annotations"],
    "additionalProperties": False,
    "properties": {
        "alert": {"type": "string", "pattern": "^Rollout[A-Za-z]+$"},
        "expr": {"type": "string"},
        "for": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "labels": {"type": "object", "required": ["severity"]},
        "annotations": {"type": "object", "required": ["summary", "description"]},
    },
}
GROUP = {"type": "object", "required": ["name", "rules"], "properties": {"rules": {"type": "array", "items": RULE}}}
RULES = {"type": "object", "required": ["groups"], "properties": {"groups": {"type": "array", "items": GROUP}}}


def rules() -> Any:
    return yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())


def board() -> Any:
    return json.loads((DEPLOY / "grafana" / "rollout.json").read_text())


def expressions() -> Iterator[str]:
    for group in rules()["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in board()["panels"]:
        yield from (target["expr"].replace("$__rate_interval", "1m") for target in panel.get("targets", ()))


def selectors(expression: str) -> list[Any]:
    """Every vector selector of a PromQL expression."""
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), found.append)
    return [one for one in found if isinstance(one, promql_parser.VectorSelector)]


@pytest.fixture
async def exposed(tmp_path: Path) -> AsyncIterator[dict[str, set[str]]]:
    """Labels by name of metric, after a run with an item that is tried again and one that fails."""
    nodes = Nodes(tmp_path)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    nodes.env["ROLLOUT_HTTP__LISTEN_ADDR"] = addresses[0]
    try:
        await nodes.coordinator().event("coordinator_ready")
        await nodes.worker(http__listen_addr=addresses[1]).event("worker_ready")
        async with await nodes.client() as runs:
            items = [script({"echo": "a"}), script({"fail_times": 1}, RETRY), script({"fail_times": 1, "fatal": True})]
            await collect(runs, await submit(runs, items))
        yield {
            sample.name: set(sample.labels)
            for address in addresses
            for family in text_string_to_metric_families((await fetch(address, "/metrics"))[1])
            for sample in family.samples
        }
    finally:
        nodes.close()


async def test_every_metric_and_label_of_the_board_and_the_rules_is_exposed(exposed: dict[str, set[str]]) -> None:
    used = [one for expr in expressions() for one in selectors(expr)]
    assert {one.name for one in used} <= set(exposed) | {"rollout_calls_refused_total"}  # none was refused
    for one in used:
        labels = {matcher.name for matcher in one.matchers.matchers} - {"job"}
        assert labels <= exposed.get(one.name, labels), one.name


def test_the_board_and_the_rules_are_valid() -> None:
    jsonschema.validate(rules(), RULES)
    jsonschema.validate(board(), BOARD)
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24  # none covers another
    variables = {"datasource", *(one["name"] for one in board()["templating"]["list"]), "__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables


def test_what_prometheus_and_grafana_read_is_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.monitoring.yaml").read_text())["services"]
    mounted = {place.split(":")[0] for service in compose.values() for place in service["volumes"]}
    assert all((DEPLOY / place).exists() for place in mounted)
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).exists() for name in scraped["rule_files"])
    places = {one.split(":")[1] for service in compose.values() for one in service["volumes"]}
    provider = yaml.safe_load((DEPLOY / "grafana" / "provisioning.yml").read_text())["providers"][0]
    assert f"{provider['options']['path']}/rollout.json" in places


async def value(node: Any, name: str) -> float:
    page = (await fetch(node.probes.addr, "/metrics"))[1]
    return float(re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)[0])


async def beyond(node: Any, name: str, least: float) -> float:
    """The value, once it is more than `least`."""
    while True:
        if (found := await value(node, name)) > least:
            return found
        await asyncio.sleep(0.1)


async def test_faults_of_objects_and_free_space_are_counted(tmp_path: Path) -> None:
    async with (
        inprocess(tmp_path, extra=HTTP) as (node, parts),
        asyncio.timeout(60),
        await Runs.connect([node.addr], tls_dir=tmp_path / "tls") as runs,
    ):
        assert await beyond(node, "rollout_disk_size_bytes", 0) == shutil.disk_usage(tmp_path).total
        run_id = str(ULID())
        await runs.open(RunSpec(run_id=run_id, workload="script", config=b"{}"))
        shutil.rmtree(tmp_path / "objects")
        (tmp_path / "objects").touch()
        async with runs.objects(run_id) as objects:
            putting = asyncio.create_task(objects.put_pieces([b"x" * 5000]))
            await beyond(node, "rollout_object_store_errors_total", 0)
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)
        counted = await value(node, "rollout_object_store_errors_total")
        assert parts.objects_child.pid is not None
        os.kill(parts.objects_child.pid, signal.SIGKILL)
        await beyond(node, "rollout_object_store_errors_total", counted)


async def test_a_lost_worker_is_counted(tmp_path: Path) -> None:
    times = {"heartbeat_interval": 100, "clock_skew_budget": 50, "worker_self_fence_timeout": 800}
    nodes = Nodes(tmp_path, **{f"{k}_ms": str(v) for k, v in (times | {"coordinator_failure_timeout": 1500}).items()})
    nodes.env["ROLLOUT_HTTP__LISTEN_ADDR"] = address = f"127.0.0.1:{free_port()}"
    try:
        coordinator = nodes.coordinator()
        await coordinator.event("coordinator_ready")
        worker = nodes.worker(http__listen_addr="")
        await worker.event("worker_ready")
        worker.kill()
        await coordinator.event("worker_failed")
        assert "rollout_workers_lost_total 1.0" in (await fetch(address, "/metrics"))[1]
    finally:
        nodes.close()
