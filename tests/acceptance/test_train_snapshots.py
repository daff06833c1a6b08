"""What is done with a training run afterwards: fork, verify, plot, serve, prune; across private clusters."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, Finished, until
from rollout.client import snapshots
from rollout.client.embedded import Embedded
from rollout.client.runs import Runs, new_ulid
from rollout.model.errors import NotFoundError
from rollout.model.run import RunSpec
from rollout.workloads.train.commands.snapshots import prune_snapshots
from rollout_worker.backends.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROWS = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(20)]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A directory with a model that has dropout, and a run of four segments in `first`, of which two are kept."""
    directory = tmp_path_factory.mktemp("snapshots")
    state = {"XDG_STATE_HOME": str(directory / ".state"), "XDG_CONFIG_HOME": str(directory / ".config")}
    found = Cli(directory, state)
    make_tiny(directory / "tiny")
    config = json.loads((directory / "tiny" / "config.json").read_text())
    (directory / "tiny" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = found.run("train", "sft", "--config", configure(found, "first"), timeout=200)
    assert done.code == 0, done
    yield found
    for process in found.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not found.left_behind(), "every process to end")


def configure(cli: Cli, name: str, **more: Any) -> str:
    keys = {
        "base_model.uri": "tiny", "dataset.path": "rows.jsonl", "minibatch_size": 4, "optimizer.lr": 1e-3,
        "optimizer.schedule": "cosine", "optimizer.warmup_steps": 2, "budget.max_steps": 8, "seed": 7,
    } | more  # fmt: skip
    lines = ["[algorithm]", 'kind = "sft"', "[algorithm.sft]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items())]
    lines += ["[snapshots]", "every_steps = 2", "keep_last = 2", 'label = "done"', "[output]", f'dir = "{name}"']
    path = cli.directory / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path.name


def outcome(cli: Cli, name: str) -> dict[str, Any]:
    summary = json.loads((cli.directory / name / "summary.json").read_text())
    return {key: summary[key] for key in ("state", "steps", "final_snapshot", "weights_hash")}


def metrics(cli: Cli, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (cli.directory / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def listed(cli: Cli, run: str) -> list[dict[str, Any]]:
    return json.loads(cli.run("snapshot", "list", "--run", run, "--json").out)["snapshots"]


def refused(cli: Cli, *words: str) -> str:
    done: Finished = cli.run(*words)
    assert done.code == 2, done
    return done.err


def test_what_is_kept_and_labelled_is_listed(cli: Cli) -> None:
    found = listed(cli, "first")
    assert [(one["step"], one["label"]) for one in found] == [(6, ""), (8, "done")]
    assert found[-1]["id"] == outcome(cli, "first")["final_snapshot"]
    table = cli.run("snapshot", "list", "--dir", "first").out.splitlines()
    assert len(table) == 3 and table[0].split() == ["snapshot", "run", "name", "kind", "step", "size", "made", "label"]


@pytest.mark.slow
def test_a_fork_with_the_same_settings_ends_in_the_same_bytes(cli: Cli) -> None:
    """In a cluster of its own, to which the snapshot is brought; the second time it is complete already, and its model
    is made, which was not wanted before."""
    words = ("train", "fork", "first", "--step", "6", "--config", configure(cli, "fork"))
    done = cli.run(*words, timeout=200)
    assert done.code == 0 and "bringing snapshot" in done.out and "brought snapshot" in done.out, done
    assert done.out.count("no command works there at present") == 1
    assert outcome(cli, "fork") == outcome(cli, "first")
    assert metrics(cli, "fork") == metrics(cli, "first")[6:]
    with (cli.directory / "fork.toml").open("a") as config:
        config.write("model = true\n")
    again = cli.run(*words)
    assert again.code == 0 and "is complete already" in again.out and "made now: fork/model" in again.out, again
    assert (cli.directory / "fork" / "model" / "model.safetensors").stat().st_size
    assert "it began with run:first, step 6, and not with run:first, step 8" in refused(
        cli, "train", "fork", "first", "--step", "8", "--config", "fork.toml"
    )


@pytest.mark.parametrize(
    ("run", "step", "settings", "words"),
    [
        ("first", 6, {"optimizer.kind": "sgd"}, "optimizer.kind: it was adamw and is sgd now"),
        ("nobody", 6, {}, "there is no run 'nobody', as far as is known here"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_before_anything_starts(
    cli: Cli, run: str, step: int, settings: dict[str, Any], words: str
) -> None:
    config = configure(cli, "bad", **settings)
    assert words in refused(cli, "train", "fork", run, "--step", str(step), "--config", config)
    assert not (cli.directory / "bad").exists()


def test_a_snapshot_of_another_cluster_is_served_and_resumed_from_in_any_directory(cli: Cli) -> None:
    """The mock engine answers; that the bytes came is what its executor needs to start."""
    (elsewhere := cli.directory / "elsewhere").mkdir()
    there = Cli(elsewhere, cli.env, cli.started)
    there.rows(2)
    absent = there.config(model={"uri": "run:second"})
    assert "no run 'second'" in refused(there, "infer", "batch", "--config", str(absent), "--dry-run")
    batch = there.config(model={"uri": "run:first"})
    checked = there.run("infer", "batch", "--config", str(batch), "--dry-run")
    assert checked.code == 0 and "run:first: snapshot" in checked.out, checked
    done = there.run("infer", "batch", "--config", str(batch))
    assert done.code == 0 and len(there.completions()) == 2, done
    snapshot = outcome(cli, "first")["final_snapshot"]
    assert there.completions()[0]["model_content_id"] == snapshot
    assert "no run 'first'" in refused(there, "train", "plot", "first", "--dir", "out")
    over = refused(cli, "train", "sft", "--config", configure(cli, "over"), "--resume", f"snapshot:{snapshot[:9]}")
    assert "over.toml" in over and "step 8 is done, and this run has 8 steps" in over


@pytest.mark.slow
def test_a_changed_metric_is_noticed_and_everything_else_is_equal(cli: Cli) -> None:
    """Of the third segment, to which it is gone from the base model, since two snapshots were let go."""
    shutil.copytree(cli.directory / "first", cli.directory / "changed")
    with sqlite3.connect(cli.directory / "changed" / ".rollout" / "rollout.db") as database:
        (data,) = database.execute("SELECT data FROM result WHERE seq = 3").fetchone()
        result = json.loads(data)
        result["metrics"][1]["loss"] += 1e-9
        database.execute("UPDATE result SET data = ? WHERE seq = 3", (json.dumps(result).encode(),))
    database.close()
    done = cli.run("train", "verify", "first", "--segment", "3", "--json", "--dir", "changed", timeout=200)
    segments = [event for event in done.events if event["event"] == "segment"]
    assert [(one["segment"], one["differs"]) for one in segments] == [(1, []), (2, []), (3, ["metrics"])], done
    assert done.event("verifying")["from"] == 1
    verdict = {"same": 2, "different": [3], "failed": [], "different_hardware": False}
    assert {key: done.event("verified")[key] for key in verdict} == verdict
    assert done.code == 1


def test_curves_are_drawn_from_the_commit_log(cli: Cli) -> None:
    done = cli.run("train", "plot", "first", "--output", "drawn.svg", "--json")
    assert json.loads(done.out)["steps"] == 8
    assert "</svg>" in (cli.directory / "drawn.svg").read_text()
    assert "no directory" in refused(cli, "train", "plot", "first", "--output", "nowhere/x.png")


async def test_what_an_open_run_names_outlives_prune_and_goes_with_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cluster of `first`, in which another run begins with its third snapshot."""
    monkeypatch.chdir(cli.directory)
    shutil.copytree("first", "pruned")
    state = Path("pruned/.rollout")
    embedded = Embedded(state, workers=0, report=print)
    await embedded.start()
    try:
        async with await Runs.connect([embedded.address], tls_dir=state / "tls", patience_s=10.0) as client:
            (run,) = [status.spec.run_id for status in await client.list()]
            older, newest = await snapshots.snapshots_of(client, run)
            other = new_ulid()
            await client.open(RunSpec(run_id=other, workload="train", config=b'{"verifies": "x"}'))
            assert await snapshots.pin_snapshot(client, other, older.id)
            rules: dict[str, Any] = {"keep_last": 1, "keep_labeled": None, "max_age_s": None}
            assert await prune_snapshots(client, run, **rules) == ([older], 0)
            await client.download(other, bytes.fromhex(older.id), state / "whole.tar")
            assert await snapshots.snapshots_of(client, run) == [newest]
            with pytest.raises(
                NotFoundError, match=r"ended at step 5: the nearest are 4, 6; it has those of the steps 8"
            ):
                await snapshots.snapshot_at(client, run, 5)
            with pytest.raises(NotFoundError, match=r"of step 6 of run .* was let go.* it has those of the steps 8"):
                await snapshots.snapshot_at(client, run, 6)
            assert await prune_snapshots(client, run, **rules) == ([], 0), "the newest stays"
    finally:
        await asyncio.shield(embedded.stop())
