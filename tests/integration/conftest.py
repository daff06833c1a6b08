"""Clusters of real daemons for the tests of the engine; `cluster` is that of the smokes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from engine_cluster import Engine, EngineCluster, database

TAIL = 40
"""Lines of each daemon's log that are shown of a test that failed: the daemons' directories are gone by then."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for engine in item.funcargs.values():
            if isinstance(engine, Engine):
                nodes = [node for node in engine.cluster.nodes if node.alive()]
                report.sections += [(f"log of {node.name}", node.tail(TAIL)) for node in nodes]
    return report


@pytest.fixture(scope="session", params=["sqlite"])
def calm_cluster(request: pytest.FixtureRequest) -> Iterator[EngineCluster]:
    """Three workers that nobody kills: node 1 (4 slots, 2 gpus, role `gpu`, a plugin), 2 (4 slots), 3 (1 slot)."""
    import rollout_worker.hosting.samples as samples

    plugin = Path(samples.__file__).parent / "sidecar" / "rollout-plugin.toml"
    with (
        database(request) as url,
        tempfile.TemporaryDirectory(prefix="re-", ignore_cleanup_errors=True) as root,
        EngineCluster(Path(root), postgres_url=url) as cluster,
    ):
        cluster.add_coordinator().wait_event("coordinator_ready")
        gpus = {"worker.capacity": {"gpus": 2}}
        cluster.worker("1", 4, roles=["gpu"], args=["--plugin", str(plugin)], **gpus)
        cluster.worker("2", 4)
        cluster.worker("3", 1)
        cluster.ready()
        yield cluster


@pytest.fixture(scope="module", params=["sqlite"])
def rough_cluster(request: pytest.FixtureRequest) -> Iterator[EngineCluster]:
    """A coordinator that looks for its workers' deaths sooner than the default; tests add workers, and kill.

    On SQLite, and on both databases for tests marked `on_both_databases`: those that read the ledger back.
    """
    with (
        database(request) as url,
        tempfile.TemporaryDirectory(prefix="re-", ignore_cleanup_errors=True) as root,
        EngineCluster(Path(root), postgres_url=url, transport=SOONER) as cluster,
    ):
        cluster.add_coordinator().wait_event("coordinator_ready")
        yield cluster


SOONER = {
    "heartbeat_interval_ms": 250,
    "worker_self_fence_timeout_ms": 2000,
    "coordinator_failure_timeout_ms": 2500,
}


@pytest.fixture
async def calm(calm_cluster: EngineCluster, tmp_path: Path) -> AsyncIterator[Engine]:
    async with Engine(calm_cluster, tmp_path) as engine:
        yield engine


@pytest.fixture
async def rough(rough_cluster: EngineCluster, tmp_path: Path) -> AsyncIterator[Engine]:
    async with Engine(rough_cluster, tmp_path) as engine:
        yield engine
        await engine.clear()  # what a test that failed has left would hold the slots of the next
