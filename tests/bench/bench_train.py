"""Training: `rollout train sft` with its snapshots beside a bare accelerate loop and TRL's SFTTrainer, a snapshot beside a
plain copy of its bytes, and how long a killed worker is missed.

Run: python tests/bench/bench_train.py [--quick] [--only speed|snapshot|takeover] [--json]
On a GPU, 0.5 B parameters, with MFU: python tests/bench/bench_train.py --shape half --device cuda --precision bf16
--batch 8 --words 600 --steps 60 --every 20

Ours is timed from the commit of the first snapshot to that of the last, the others from a step after the first ones to
their end: start-up counts for nobody, and everything that goes on beside or between steps counts for us. They take
turns; a ratio is that of neighbours, so that what else the machine does weighs on both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_gpu import HALF_BILLION, device_name, measured_rates
from cluster import Cluster, binary
from measure import Row, directory, spread, wait_for
from rollout.workloads.train.config import SftSection
from rollout.workloads.train.memory import flops_per_token
from rollout_worker.backends.tiny import TINY, Shape, make_random
from rollout_worker.backends.training.speed import peak
from train_loops import JsonObject, Task, command, environment, write_rows

MIDDLE = Shape(
    layers=4, hidden=256, intermediate=768, heads=4, kv_heads=4, head_dim=64, vocabulary=2048, tied=False, std=0.02,
    dtype="float32",
)  # fmt: skip
SHAPES = {"tiny": TINY, "middle": MIDDLE, "half": replace(HALF_BILLION, dtype="float32")}


# ---- tokens a second


def ours(task: Task, root: Path, every: int) -> JsonObject:
    """The command itself, with a private cluster."""
    output = Path(tempfile.mkdtemp(dir=root, prefix="run-"))
    config = output / "train.toml"
    config.write_text(f"""
[algorithm]
kind = "sft"
[algorithm.sft]
base_model.uri = "{task.model}"
dataset.path = "{task.rows}"
minibatch_size = {task.batch}
max_length = {task.max_length}
precision = "{task.precision}"
device = "{task.device}"
threads = {task.threads}
optimizer = {{ lr = {task.lr}, schedule = "cosine" }}
budget.max_steps = {task.steps}
[snapshots]
every_steps = {every}
[output]
dir = "{output}/out"
""")
    env = os.environ | {"XDG_STATE_HOME": str(output / "state"), "HF_HUB_OFFLINE": "1"}
    program = binary("rollout")
    subprocess.run([program, "train", "sft", "--config", str(config)], env=env, check=True, capture_output=True)
    listed = [program, "snapshot", "list", "--json", "--dir", f"{output}/out"]
    said = subprocess.run(listed, env=env, check=True, capture_output=True, text=True).stdout
    found = json.loads(said)["snapshots"]
    first, last = found[0], found[-1]
    steps = [json.loads(line) for line in (output / "out/metrics.jsonl").read_text().splitlines()]
    taken = datetime.fromisoformat(last["created_at"]) - datetime.fromisoformat(first["created_at"])
    tokens = sum(step["tokens"] for step in steps if first["step"] < step["step"] <= last["step"])
    in_steps = sum(step["seconds"] for step in steps if first["step"] < step["step"] <= last["step"])
    shutil.rmtree(output)
    return {
        "tokens": tokens,
        "seconds": taken.total_seconds(),
        "in_steps": in_steps,
        "length": mean_length(steps, task),
    }


def mean_length(steps: list[JsonObject], task: Task) -> float:
    return sum(step["tokens"] for step in steps) / (len(steps) * task.batch)


def theirs(loop: str, task: Task) -> JsonObject:
    done = subprocess.run(
        command(loop, task), env=environment(task.threads), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def speed(name: str, shape: Shape, task: Task, root: Path, every: int, repeats: int, most: float = 0.0) -> list[Row]:
    """A row for each loop that ours is measured against. `most`: operations a second of the device."""
    loops = {"bare accelerate": 0.97, "TRL's SFTTrainer": 1.0}
    kinds = {"bare accelerate": "accelerate", "TRL's SFTTrainer": "trl"}
    rates: dict[str, list[float]] = {what: [] for what in ("ours", *loops)}
    busy, lengths = list[float](), list[float]()
    for _ in range(repeats):
        found = ours(task, root, every)
        rates["ours"].append(found["tokens"] / found["seconds"])
        busy.append(found["in_steps"] / found["seconds"])
        lengths.append(found["length"])
        for what, kind in kinds.items():
            one = theirs(kind, task)
            rates[what].append(one["tokens"] / one["seconds"])
    used = statistics.median(rates["ours"])
    made: list[Row] = []
    details = f", snapshots each {every} steps, {name}, {task.batch} rows a step"
    for what, reach in loops.items():
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates[what], strict=True))
        figure = (
            f"{ratio:.3f} x: {used:,.0f} tokens/s of {statistics.median(rates[what]):,.0f}; "
            f"{100 * statistics.median(busy):.1f} % of our time in steps; {repeats} pairs"
        )
        if most:
            share = used * operations(shape, task.model, statistics.mean(lengths)) / most
            figure += f"; MFU {100 * share:.1f} % of {most / 1e12:.0f} TFLOP/s"
        row = Row(
            f"over {what}{details if not made else ''}",
            figure, f"≥{reach}", ratio >= reach, {"ratio": ratio, "tokens_s": used},
        )  # fmt: skip
        made.append(row)
    return made


def operations(shape: Shape, model: str, length: float) -> float:
    """Of a token, by the count that the product's own MFU has."""
    section = SftSection.model_validate(
        {"base_model": model, "dataset": {"path": "-"}, "optimizer": {"lr": 1.0}, "budget": {"max_steps": 1}}
    )
    config = json.loads((Path(model) / "config.json").read_text())
    return flops_per_token("sft", section, shape.parameters, shape.parameters, config, length)


# ---- a snapshot beside a plain copy


def snapshot_rows(root: Path, shape: Shape, repeats: int) -> list[Row]:
    """The state of a model in AdamW, in the page cache for both."""
    import torch
    from rollout.snapshots.tar import pack, unpack
    from rollout_worker.backends.training import state
    from rollout_worker.backends.training.probe import Probe

    size = shape.parameters
    made = {name: torch.randn(size) for name in ("weights", "first", "second")}
    captured = state.Captured(
        {"position": {"step": 1}}, {"weights": made["weights"]}, {"0.exp_avg": made["first"], "0.exp_avg_sq": made["second"]},
        {"groups": [], "numbers": {}}, {}, [state.capture_random()], {}, Probe({}, {}),
    )  # fmt: skip
    times: dict[str, list[float]] = {what: [] for what in ("save", "copy", "restore")}
    archive, copy = root / "state.tar", root / "copy"

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = call()
        times[what].append(time.perf_counter() - began)
        return found

    def save() -> bytes:
        state.write(captured, root / "state")
        return pack(root / "state", archive).id

    def restore(expected: bytes) -> None:
        unpack(archive, root / "restored", expected)
        state.load_weights(root / "restored")
        state.load_optimizer(root / "restored")

    for _ in range(repeats):
        name = timed("save", save)
        timed("copy", lambda: shutil.copyfile(archive, copy))
        timed("restore", lambda name=name: restore(name))
        shutil.rmtree(root / "state")
        shutil.rmtree(root / "restored")
    mib = archive.stat().st_size / 2**20
    plain = statistics.median(times["copy"])
    return [
        Row(
            f"{text} a snapshot of {mib:,.0f} MiB beside a copy",
            f"{spread(times[what])} s, {statistics.median(times[what]) / plain:.1f} x {plain:.2f} s; "
            f"{mib / statistics.median(times[what]):,.0f} MiB/s",
            values={"seconds": statistics.median(times[what]), "copy": plain},
        )
        for what, text in (("save", "write"), ("restore", "load"))
    ]


# ---- a worker is killed


def takeover(repeats: int) -> list[Row]:
    """From SIGKILL of the daemon that trains, at default timeouts, to the end of a segment's steps at the other one."""
    every, steps, times = 2, 100_000, list[float]()
    with directory() as root, Cluster(root / "nodes") as cluster:
        make_random(root / "tiny", TINY)
        write_rows(root / "rows.jsonl", 200, 40)
        config = root / "train.toml"
        config.write_text(f"""
[algorithm]
kind = "sft"
[algorithm.sft]
base_model.uri = "{root}/tiny"
dataset.path = "{root}/rows.jsonl"
optimizer = {{ lr = 1e-4 }}
budget.max_steps = {steps}
[snapshots]
every_steps = {every}
[output]
dir = "{root}/out"
""")
        cluster.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker()
        for worker in cluster.workers:
            worker.wait_event("worker_ready")
        at = cluster.operator()
        out = (root / "command.log").open("w")
        process = subprocess.Popen(
            [binary("rollout"), "train", "sft", "--config", str(config), *at], stdout=out, stderr=out
        )

        def stepped(node: Any) -> bool:
            """A segment's steps are done: its state is being written."""
            return any(node.directory.glob("data/scratch/*/child-*/*-*-*/state"))

        for _ in range(repeats):
            wait_for(lambda: any(stepped(node) for node in cluster.workers), 120, "a worker to train")
            victim = next(node for node in cluster.workers if stepped(node))
            other = next(node for node in cluster.workers if node is not victim)
            victim.kill()
            began = time.monotonic()
            times.append(wait_for(lambda other=other: stepped(other), 120, "the other one to train") - began)
            victim.start()
            victim.wait_event("worker_ready", count=victim.starts)
        process.terminate()
        process.wait(timeout=60)
        out.close()
    return [
        Row(
            f"worker killed, {every} steps elsewhere, tiny model",
            f"{spread(times, 1)} s of {len(times)}", "≤10 s", statistics.median(times) <= 10,
            {"seconds": statistics.median(times)},
        )
    ]  # fmt: skip


# ---- all of it


def peak_of(precision: str) -> float:
    """Operations a second by the device's data sheet; of a device that the product does not know, as measured."""
    import torch

    return peak(torch.cuda.get_device_name(), precision) or measured_rates("cuda", False).flops_s


def speed_on(shape: str, root: Path, steps: int, every: int, repeats: int, **more: Any) -> list[Row]:
    words = more.pop("words", 48)
    model = root / shape
    if not model.exists():
        make_random(model, SHAPES[shape])
    task = Task(str(model), str(root / f"rows-{words}.jsonl"), steps=steps, warm=every, **more)
    write_rows(Path(task.rows), 2000, words)
    millions = SHAPES[shape].parameters / 1e6
    where = device_name() if task.device == "cuda" else "one thread"
    most = peak_of(task.precision) if task.device == "cuda" else 0.0
    name = f"{millions:,.1f} M parameters in {task.precision} on {where}"
    return speed(name, SHAPES[shape], task, root, every, repeats, most)


def rows(quick: bool) -> list[Row]:
    """For report.py."""
    with directory() as root:
        found = speed_on("tiny", root, 60 if quick else 600, 10 if quick else 100, 1 if quick else 5, batch=8)
        found += speed_on("middle", root, 30 if quick else 150, 5 if quick else 25, 1 if quick else 3, batch=8)
        found += snapshot_rows(root, MIDDLE if quick else replace(MIDDLE, layers=24, hidden=512), 3 if quick else 7)
    return found + takeover(1 if quick else 3)


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    made.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    made.add_argument("--only", choices=("speed", "snapshot", "takeover"), help="a part of it")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--shape", choices=sorted(SHAPES), help="tokens/s of this model alone, as --batch and so on say")
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--words", type=int, default=48, help="of a row; a word is a token or two")
    made.add_argument("--length", type=int, default=1024, help="tokens of a row at most")
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--every", type=int, default=25, help="steps between snapshots")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = made.parse_args()
    if given.shape or given.only == "speed":
        with directory() as scratch:
            every_row = speed_on(
                given.shape or "tiny", scratch, given.steps, given.every, given.repeats, batch=given.batch,
                words=given.words, device=given.device, precision=given.precision, max_length=given.length,
            )  # fmt: skip
    elif given.only == "snapshot":
        with directory() as scratch:
            every_row = snapshot_rows(scratch, SHAPES["middle"], 3 if given.quick else 7)
    else:
        every_row = takeover(1 if given.quick else 3) if given.only == "takeover" else rows(given.quick)
    if given.json:
        print(
            json.dumps(
                [{"what": row.what, "figure": row.figure, "reached": row.reached, **row.values} for row in every_row]
            )
        )
    else:
        for row in every_row:
            print(f"{row.what}: {row.figure}{f' (target {row.target}: {row.verdict})' if row.target else ''}")
