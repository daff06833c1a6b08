"""Training as a user meets it: kill anything, and the same command ends in the same bytes."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from acceptance_cli import Cli, until
from rollout_worker.backends.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS, EVERY = 24, 4
ROWS = {
    "sft": [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(40)],
    "dpo": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in range(40)],
    "ipo": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in range(40)],
    "rm": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in range(40)],
    "kto": [{"prompt": f"{n} is", "completion": f" {n}", "label": n % 3 > 0} for n in range(40)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout, so that the generators matter."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return directory


def configure(cli: Cli, kind: str, model: Path, name: str = "out", **more: Any) -> str:
    (cli.directory / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    keys = {
        "base_model.uri": str(model), "dataset.path": f"{kind}.jsonl", "minibatch_size": 4, "gradient_accumulation": 2,
        "optimizer.lr": 1e-3, "optimizer.schedule": "cosine", "optimizer.warmup_steps": 3, "budget.max_steps": STEPS,
        "disable_dropout": False, "seed": 7,
    } | more  # fmt: skip
    lines = ["[algorithm]", f'kind = "{kind}"', f"[algorithm.{kind}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    lines += ["[snapshots]", f"every_steps = {EVERY}", "[output]", f'dir = "{name}"']
    path = cli.directory / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def result(cli: Cli, name: str = "out") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What has to be the same: what the run ended in, and its metrics but for the time they took."""
    summary = json.loads((cli.directory / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (cli.directory / name / "metrics.jsonl").read_text().splitlines()]
    kept = {key: summary[key] for key in ("state", "steps", "final_snapshot", "weights_hash", "fingerprint")}
    return kept, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def metrics(cli: Cli, name: str = "out") -> int:
    path = cli.directory / name / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def processes(cli: Cli, *words: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = " ".join(process.info["cmdline"] or [])
        inside = str(process.info["cwd"] or "").startswith(str(cli.directory)) or str(cli.directory) in command
        if inside and any(word in command for word in words):
            found.append(process)
    return found


def kill(cli: Cli, *words: str) -> None:
    for process in processes(cli, *words):
        process.kill()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_killed_anywhere_it_ends_in_the_same_bytes(cli: Cli, model: Path, kind: str) -> None:
    """A process that trains in mid-step, its worker, the coordinator, then the whole command."""
    undisturbed = cli.run("train", kind, "--config", configure(cli, kind, model, "calm"), timeout=300)
    assert undisturbed.code == 0, undisturbed
    expected = result(cli, "calm")
    assert expected[0]["steps"] == STEPS and len(expected[1]) == STEPS

    config, luck = configure(cli, kind, model), random.Random(kind)
    process = cli.start("train", kind, "--config", config)
    for victim, at in (("training.rank", 4), ("rollout_worker", 8), ("rollout_coordinator", 12)):
        until(lambda at=at: metrics(cli) >= at or process.poll() is not None, f"{at} steps", 180)
        time.sleep(luck.uniform(0, 1))  # anywhere in a segment, its snapshot or its upload
        kill(cli, victim)
    until(lambda: metrics(cli) >= 16 or process.poll() is not None, "16 steps", 180)
    process.kill()
    process.wait()
    done = cli.run("train", kind, "--config", config, timeout=300)
    assert done.code == 0, done
    assert result(cli) == expected
    assert not processes(cli, "training.rank"), "no process that trains is left"
