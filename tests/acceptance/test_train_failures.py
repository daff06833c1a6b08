"""A training run that meets what can go wrong, as its user sees it: told at once, nothing lost, and what to do."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from acceptance_cli import Cli, until
from rollout_worker.backends.tiny import make_tiny

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="prlimit makes the writes of another process fail"),
]
LARGEST = 100_000
"""Bytes of a file: tokens are smaller, the state of a model is not."""


def configure(cli: Cli, **keys: Any) -> str:
    make_tiny(cli.directory / "tiny")
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(40)]
    (cli.directory / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "base_model.uri": "./tiny", "dataset.path": "sft.jsonl", "minibatch_size": 8, "seed": 7, **keys,
    }  # fmt: skip
    lines = ["[algorithm]", 'kind = "sft"', "[algorithm.sft]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += ["[snapshots]", "every_steps = 3", "[output]", 'dir = "out"']
    (cli.directory / "train.toml").write_text("\n".join(lines) + "\n")
    return "train.toml"


def rank_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "rollout_worker.backends.training.rank" in child.cmdline():
                return child
        except psutil.NoSuchProcess:
            continue
    return None


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_disk_that_is_full_and_then_a_loss_that_explodes(cli: Cli) -> None:
    """The first snapshot finds no room while the steps behind it already come to a bad end: that end waits for it."""
    keys = {"optimizer.lr": 100, "optimizer.warmup_steps": 60, "optimizer.max_grad_norm": 0, "budget.max_steps": 60}
    process = cli.start("train", "sft", "--config", configure(cli, **keys), "--json")
    until(lambda: rank_of(process) is not None or process.poll() is not None, "the process that trains")
    rank = rank_of(process)
    assert rank is not None, process.communicate()
    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (LARGEST, resource.RLIM_INFINITY))
    said: list[dict[str, Any]] = []
    for event in events(process):
        said.append(event)
        if event["event"] == "cause":
            break
    cause = said[-1]
    assert cause["code"] == "disk_full" and "File too large" in cause["message"], said
    shown = cli.run("run", "show", "@last", "--dir", "out").out
    assert "waits for room: the snapshot cannot be written" in shown and "train, running" in shown
    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said += events(process)
    assert process.wait() == 1

    live = [event for event in said if event["event"] == "progress"]
    assert any("turning the rows into tokens" in event.get("note", "") for event in live), "it says what it does first"
    steps = [event for event in live if "step" in event]
    assert steps and steps[0]["steps"] == 60 and steps[0]["lr"] > 0 and steps[0]["loss"] > 0

    summary = json.loads((cli.directory / "out" / "summary.json").read_text())
    (failure,) = jsonl(cli.directory / "out" / "errors.jsonl")
    metrics = jsonl(cli.directory / "out" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    committed = [line for line in metrics if "committed" not in line]
    assert len(committed) % 3 == 0 and metrics[: len(committed)] == committed
    assert all(line["committed"] is False for line in metrics[len(committed) :])
    assert summary["attempts"]["retried"] == 0, "nothing was done twice"
    assert failure["code"] in ("loss_exploded", "loss_not_finite") and failure["attempts"] == 1
    found = re.search(r"at step (\d+), which trains on the rows ([\d, ]+):", failure["message"])
    assert found and summary["steps"] < int(found[1]) <= summary["steps"] + 3 and len(found[2].split(",")) == 8
    assert failure["message"] in summary["reason"]
    assert summary["final_snapshot"] and summary["steps"] == len(committed)
    assert len(metrics) == int(found[1]) - 1, "the steps before it are there, also those that no snapshot holds"
    assert (cli.directory / "out" / "curves.png").exists()
    plotted = json.loads(cli.run("train", "plot", "@last", "--output", "again.svg", "--json").out)
    assert (plotted["steps"], plotted["committed_steps"]) == (len(metrics), len(committed))

    reason = json.loads(cli.run("run", "show", "@last", "--dir", "out", "--json").out)
    assert reason["state"] == "failed" and failure["message"] in reason["reason"]
    again = cli.run("train", "sft", "--config", "train.toml")
    assert again.code == 1 and failure["message"] in again.out
    assert "a segment that failed is final" in again.out
    assert f"{summary['final_snapshot']} of step {summary['steps']}" in again.out
    assert f"rollout train fork {summary['run_id'][-8:]} --step {summary['steps']}" in again.out
    assert json.loads((cli.directory / "out" / "summary.json").read_text()) == summary
    assert metrics == jsonl(cli.directory / "out" / "metrics.jsonl")
