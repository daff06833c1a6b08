"""What changes the bytes of a training run and what does not: the table of docs/determinism.md.

Run: python tests/bench/determinism.py        (a quarter of an hour at most, on two cores)

The tiny model of smoke/tiny_task.py trains with dropout and a changing learning rate, through `rollout train sft`, each
time with one thing changed, and is compared with a run where nothing is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

import tiny_task
from cluster import binary

STEPS = 60
CONFIG = """\
[algorithm]
kind = "sft"

[algorithm.sft]
base_model.uri = "words/model"
dataset.path = "words/train.jsonl"
optimizer = {{ lr = 3e-3, schedule = "cosine", warmup_steps = 10 }}
budget.max_steps = {steps}
{keys}

[snapshots]
every_steps = {every}

[output]
dir = "{name}"
"""
KEYS = {"minibatch_size": 32, "seed": 7}


@dataclass(frozen=True)
class Change:
    what: str
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    every: int = 20
    environment: dict[str, str] = field(default_factory=dict[str, str])
    kill: bool = False


CHANGES = (
    Change("nothing"),
    Change("killed with SIGKILL: the process that trains, in the middle", kill=True),
    Change("a snapshot every 60 steps and not every 20", every=60),
    Change("4 processes beside it that keep all cores busy", environment={"BUSY": "4"}),
    Change("8 rows at once, accumulated 4 times", {"minibatch_size": 8, "gradient_accumulation": 4}),
    Change("`threads = 2`", {"threads": 2}),
    Change("instruction set: AVX2 for AVX-512", environment={"ATEN_CPU_CAPABILITY": "avx2"}),
    Change('`attention = "eager"`', {"attention": "eager"}),
    Change('`devices = 2`, `strategy = "ddp"`', {"minibatch_size": 16, "devices": 2, "strategy": "ddp"}),
    Change("`seed = 8`", {"seed": 8}),
)


@dataclass(frozen=True)
class Found:
    summary: dict[str, Any]
    losses: list[float]


def train(directory: Path, name: str, change: Change) -> Found:
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in (KEYS | change.keys).items())
    text = CONFIG.format(steps=STEPS, every=change.every, name=name, keys=keys)
    (directory / f"{name}.toml").write_text(text)
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(int(change.environment.get("BUSY", "0")))
    ]
    try:
        command = [binary("rollout"), "train", "sft", "--config", f"{name}.toml", "--local"]
        with subprocess.Popen(
            command, cwd=directory, env=os.environ | change.environment, stdout=subprocess.DEVNULL
        ) as process:
            if change.kill:
                kill_trainer(process, directory / name)
            if process.wait():
                raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}")
    finally:
        for one in busy:
            one.kill()
            one.wait()
    metrics = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / name / "summary.json").read_text())
    assert len(metrics) == STEPS
    return Found(summary, [line["loss"] for line in metrics])


def kill_trainer(process: subprocess.Popen[bytes], output: Path) -> None:
    """Once the first segment is committed."""
    while not (output / "metrics.jsonl").exists() or not (output / "metrics.jsonl").stat().st_size:
        if process.poll() is not None:
            raise RuntimeError("it ended before it could be killed")
        time.sleep(0.02)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "rollout_worker.backends.training.rank" in child.cmdline():
            child.kill()
            return
    raise RuntimeError("no process that trains was found")


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    return ", ".join(changed) or "the same"


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        tiny_task.write_all(directory / "words", dropout=0.05)
        first = train(directory, "run-0", Change("the run that is compared with"))
        print("| what is changed | fingerprint | weights | largest difference of a loss |")
        print("|---|---|---|---|")
        surprises = 0
        for number, change in enumerate(CHANGES, 1):
            found = train(directory, f"run-{number}", change)
            same = found.summary["weights_hash"] == first.summary["weights_hash"]
            apart = max(abs(one - other) for one, other in zip(first.losses, found.losses, strict=True))
            fingerprint = differences(first.summary["fingerprint"], found.summary["fingerprint"])
            surprises += not same and fingerprint == "the same" and not change.keys
            surprises += change.kill and not found.summary["attempts"]["retried"]
            print(
                f"| {change.what} | {fingerprint} | {'**the same bytes**' if same else 'others'} | {apart:.1e} |",
                flush=True,
            )
        cpu = first.summary["fingerprint"]
        print(f"\n{STEPS} steps; {cpu['device']}, torch {cpu['versions']['torch']}.")
        return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
