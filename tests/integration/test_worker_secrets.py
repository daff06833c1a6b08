"""Secrets reach the processes that run attempts by the allowlist only, and come out nowhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from blake3 import blake3
from rollout.model.item import Outcome
from worker_nodes import Nodes, collect, run_all, script, submit

ALLOWED, OTHER, MEANT = "sesame-allowed-4711", "sesame-other-4712", "sesame-from-the-run-4713"


@pytest.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    monkeypatch.setenv("ROLLOUT_SECRET_ENGINE_TOKEN", ALLOWED)
    monkeypatch.setenv("ROLLOUT_SECRET_OTHER_TOKEN", OTHER)
    try:
        await nodes.coordinator().event("coordinator_ready")
        allow = json.dumps(["ENGINE_TOKEN", "UNSET_TOKEN"])
        await nodes.worker(worker__slots=1, secrets__allow=allow).event("worker_ready")
        yield nodes
    finally:
        nodes.close()


def hash_of(value: str) -> str:
    return blake3(value.encode()).hexdigest()


async def test_a_child_sees_the_allowed_ones_under_their_own_names_and_no_others(nodes: Nodes) -> None:
    names = [
        "ENGINE_TOKEN", "UNSET_TOKEN", "OTHER_TOKEN", "ROLLOUT_SECRET_ENGINE_TOKEN", "ROLLOUT_SECRET_OTHER_TOKEN", "PATH",
    ]  # fmt: skip
    async with await nodes.client() as runs:
        found = json.loads((await run_all(runs, [script({"environ": names})]))[0].data)
        assert found.pop("PATH")
        assert found == dict.fromkeys(names[1:-1]) | {"ENGINE_TOKEN": hash_of(ALLOWED)}


async def test_a_run_cannot_put_another_value_in_its_place(nodes: Nodes) -> None:
    async with await nodes.client() as runs:
        run = await submit(runs, [script({"environ": ["ENGINE_TOKEN"]})], {"environment": {"ENGINE_TOKEN": MEANT}})
        entries, _ = await collect(runs, run)
        assert json.loads(entries[0].data) == {"ENGINE_TOKEN": hash_of(ALLOWED)}


async def test_a_secret_that_is_printed_or_quoted_in_a_failure_is_hidden(nodes: Nodes) -> None:
    async with await nodes.client() as runs:
        (entry,) = await run_all(runs, [script({"leak": "ENGINE_TOKEN"})])
    assert entry.outcome is Outcome.FAILED and entry.failure is not None
    assert entry.failure.message == "the secret is ***"
    worker = nodes.workers[0]
    assert "the secret is ***" in [e["text"] for e in worker.events("child_output")]
    nodes.close()
    files = [path for path in nodes.root.rglob("*") if path.is_file()]
    assert any(path.name == "rollout.db" for path in files) and worker.log in files
    for path in files:
        with suppress(FileNotFoundError):  # SQLite's: the objects' server ends in order, after its coordinator
            assert ALLOWED.encode() not in path.read_bytes(), path
