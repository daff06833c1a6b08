"""Reinforcement learning: `rollout train grpo` beside TRL's GRPOTrainer, several workers that draw samples, samples of an
older version, an engine that takes other weights, and what the ledger costs a group.

Run: python tests/bench/bench_rl.py [--quick] [--only trl|workers|lag|switch|ledger] [--json]

Ours is timed from the commit of the first snapshot to that of the last, TRL's from its first steps to its end. Sides take
turns, and a ratio is that of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

from bench_train import MIDDLE
from cluster import Cluster, binary
from measure import Row, cpu_s, directory, spread
from rollout_worker.backends.tiny import TINY, Shape, make_random
from train_loops import JsonObject, environment

LARGE = replace(MIDDLE, layers=8, hidden=1024, intermediate=3072, heads=16, kv_heads=16, vocabulary=16_384)
"""Of 0.5 GB in float32."""
REWARDS = """
def some(prompts, completions, **columns):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


@dataclass(frozen=True)
class Task:
    """`warm`: steps that are not counted; with ours, those of a segment too."""

    model: str
    rows: str
    prompts: int = 4
    generations: int = 16
    tokens: int = 32
    steps: int = 30
    warm: int = 6

    @property
    def samples(self) -> int:
        return self.prompts * self.generations


def make(root: Path, shape: Shape) -> Task:
    model, rows = root / "model", root / "prompts.jsonl"
    make_random(model, replace(shape, std=0.02))
    rows.write_text("".join(json.dumps({"prompt": f"{n} and {n + 1} is"}) + "\n" for n in range(100, 612)))
    return Task(str(model), str(rows))


def ours(task: Task, root: Path, at: Sequence[str] = (), generation: str = "", settings: str = "") -> JsonObject:
    """`at`: options that name a cluster; none: one of its own. Steps a second, and lines of metrics by step."""
    output = Path(tempfile.mkdtemp(dir=root, prefix="run-"))
    (output / "rewards.py").write_text(REWARDS)
    (output / "train.toml").write_text(f"""
[algorithm]
kind = "grpo"
[algorithm.grpo]
base_model.uri = "{task.model}"
dataset.path = "{task.rows}"
reward = "rewards:some"
prompts_per_step = {task.prompts}
num_generations = {task.generations}
max_completion_length = {task.tokens}
minibatch_size = {task.samples}
optimizer = {{ lr = 1e-5 }}
budget.max_steps = {task.steps}
device = "cpu"
{settings}
[generation]
{generation}
[snapshots]
every_steps = {task.warm}
[output]
dir = "out"
""")
    env = os.environ | {"XDG_STATE_HOME": str(output / "state"), "HF_HUB_OFFLINE": "1"}

    def rollout(*arguments: str) -> str:
        done = subprocess.run(
            [binary("rollout"), *arguments, *at], env=env, cwd=output, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return done.stdout

    rollout("train", "grpo", "--config", "train.toml")
    where = () if at else ("--dir", "out")
    found = json.loads(rollout("snapshot", "list", "--json", *(where or ("--run", "out"))))["snapshots"]
    first, last = found[0], found[-1]
    taken = datetime.fromisoformat(last["created_at"]) - datetime.fromisoformat(first["created_at"])
    lines = [json.loads(line) for line in (output / "out/metrics.jsonl").read_text().splitlines()]
    steps = last["step"] - first["step"]
    return {"rate": steps / taken.total_seconds(), "lines": [one for one in lines if one["step"] > task.warm]}


def trl_loop(task: Task) -> float:
    """Steps a second of TRL's trainer, which draws with transformers too."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    def some(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
        return [sum(map(ord, text)) % 7 / 7 for text in completions]

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == task.warm:
                self.began = time.perf_counter()

    clock = Clock()
    rows = [json.loads(line) for line in Path(task.rows).read_text().splitlines()]
    arguments = trl.GRPOConfig(  # pyright: ignore[reportPrivateImportUsage]
        output_dir=str(Path(task.rows).parent / "trl"), report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, per_device_train_batch_size=task.samples, num_generations=task.generations,
        max_completion_length=task.tokens, max_steps=task.steps, learning_rate=1e-5, save_strategy="no", logging_steps=1,
        optim="adamw_torch_fused", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    trainer: Any = trl.GRPOTrainer(  # pyright: ignore[reportPrivateImportUsage]
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32), args=arguments, reward_funcs=some,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return (task.steps - task.warm) / (time.perf_counter() - clock.began)


def against_trl(root: Path, quick: bool) -> list[Row]:
    task = make(root, MIDDLE)
    task = replace(task, steps=8, warm=2) if quick else task
    pairs: list[tuple[float, float]] = []
    for _ in range(1 if quick else 3):
        mine = ours(task, root)["rate"]
        done = subprocess.run(
            [sys.executable, __file__, "--trl", json.dumps(asdict(task))], env=environment(1), check=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        pairs.append((mine, float(done.stdout.splitlines()[-1])))
    ratio = statistics.median(a / b for a, b in pairs)
    return [
        Row(
            f"over TRL's GRPOTrainer, {MIDDLE.parameters / 1e6:.1f} M parameters, fp32, {task.prompts} x {task.generations} "
            f"samples of {task.tokens} tokens",
            f"{ratio:.2f} x: {spread([a for a, _ in pairs])} steps/s of {spread([b for _, b in pairs])}; "
            f"{len(pairs)} pairs",
            "≥1.0", ratio >= 1.0, {"ratio": ratio},
        )
    ]  # fmt: skip


LABELS = {"role": "generate"}
IDLE_S = 10.0
"""What daemons do when there is nothing to do is measured for so long, and does not count."""
SEPARATE = 'placement = "separate"\nrequire_labels = { role = "generate" }'


def cluster_of(root: Path, generators: int) -> Cluster:
    cluster = Cluster(root)
    cluster.add_coordinator().wait_event("coordinator_ready")
    for labels in ({}, *[LABELS] * generators):
        more: dict[str, Any] = {"worker.labels": labels}
        cluster.add_worker(**more)
    for worker in cluster.workers:
        worker.wait_event("worker_ready")
    return cluster


def waited(found: JsonObject) -> float:
    """Seconds that the trainer waited for a step's samples, its median."""
    return statistics.median(one["seconds/rollouts"] for one in found["lines"])


def workers(root: Path, quick: bool) -> list[Row]:
    task = replace(make(root, MIDDLE), prompts=8, generations=8, steps=6 if quick else 18, warm=2 if quick else 6)
    pairs: list[tuple[float, float]] = []
    with cluster_of(root / "one", 1) as one, cluster_of(root / "two", 2) as two:
        for _ in range(1 if quick else 3):
            of = [ours(task, root, cluster.operator(), SEPARATE) for cluster in (one, two)]
            pairs.append((waited(of[0]), waited(of[1])))
    ratio = statistics.median(a / b for a, b in pairs)
    return [
        Row(
            f"two sampling workers over one, {task.prompts} groups, {os.cpu_count()} cores",
            f"{ratio:.2f} x: {spread([b for _, b in pairs])} s a step of {spread([a for a, _ in pairs])}; "
            f"{len(pairs)} pairs",
            "≥1.7 where cores allow", ratio >= 1.7, {"ratio": ratio},
        )
    ]  # fmt: skip


def lag(root: Path, quick: bool) -> list[Row]:
    task = replace(make(root, MIDDLE), steps=6 if quick else 30, warm=2 if quick else 10)
    pairs: list[tuple[float, float]] = []
    with cluster_of(root / "one", 1) as cluster:
        for _ in range(1 if quick else 3):
            of = [ours(task, root, cluster.operator(), SEPARATE, f"lag = {n}")["rate"] for n in (0, 1)]
            pairs.append((of[1], of[0]))
    ratio = statistics.median(a / b for a, b in pairs)
    return [
        Row(
            f"steps/s with lag = 1 over lag = 0, a worker that trains and one that draws, segments of {task.warm} steps",
            f"{ratio:.2f} times: {spread([a for a, _ in pairs])} steps/s and {spread([b for _, b in pairs])}; "
            f"{len(pairs)} pairs",
            values={"ratio": ratio},
        )
    ]  # fmt: skip


def switch(root: Path, quick: bool) -> list[Row]:
    """All weights changed, and are in the page cache; the copy is one in memory."""
    import torch
    from rollout_worker.backends.opening import open_backend
    from rollout_worker.backends.policy import PolicyBackend
    from rollout_worker.backends.port import BackendOptions
    from safetensors import safe_open

    make_random(root / "large", LARGE)
    path = root / "large/model.safetensors"
    opened: Any = safe_open(path, framework="pt")
    with opened as file:
        names = list(file.keys())
    source = torch.ones(path.stat().st_size, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def copy() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    async def measured() -> list[tuple[float, float]]:
        options = {"dtype": "float32", "device": "cpu"}
        engine = open_backend(
            BackendOptions(str(root / "large"), str(root / "large"), "transformers", options, trained=True)
        )
        assert isinstance(engine, PolicyBackend)
        await engine.start()
        pairs: list[tuple[float, float]] = []
        for _ in range(4 if quick else 10):
            began = time.perf_counter()
            await engine.load_weights({path: names})
            pairs.append((time.perf_counter() - began, copy()))
        await engine.close()
        return pairs[1:]

    pairs = asyncio.run(measured())
    ratio = statistics.median(a / b for a, b in pairs)
    return [
        Row(
            f"weight switch, {len(source) / 1e9:.2f} GB, transformers, beside a copy",
            f"{spread([a for a, _ in pairs], 3)} s, {ratio:.2f} x {spread([b for _, b in pairs], 3)}",
            "≤1.5", ratio <= 1.5, {"ratio": ratio},
        )
    ]  # fmt: skip


def ledger(root: Path, quick: bool) -> list[Row]:
    """What a group more costs in a step: it is two items, with its scoring. Bare: the same engine and function, without
    ledger and processes, one group after the other."""
    from policy_rig import PolicyRig
    from policy_tasks import Start

    task = replace(make(root, TINY), generations=2, tokens=1, steps=4 if quick else 12, warm=2)
    few, many = 16, 128

    class Bare(PolicyRig):
        def ask(self, **question: Any) -> dict[str, Any]:
            began = time.perf_counter()
            found = super().ask(**question)
            waits.append(time.perf_counter() - began)
            return found

    product, bare, used = dict[int, float](), dict[int, float](), dict[int, float]()
    with cluster_of(root / "cluster", 0) as cluster:
        daemons = [node.process.pid for node in (*cluster.coordinators, *cluster.workers) if node.process is not None]

        def spent() -> float:
            """Processor seconds of the coordinator with its objects server, and of the worker without its engines."""
            return cpu_s(daemons[0], children=True) + cpu_s(daemons[1])

        began = spent()
        time.sleep(IDLE_S)
        idle = (spent() - began) / IDLE_S
        for prompts in (few, many):
            waits: list[float] = []
            sized, before, at = replace(task, prompts=prompts), spent(), time.monotonic()
            product[prompts] = waited(ours(sized, root, cluster.operator(), "groups_at_once = 16"))
            used[prompts] = spent() - before - idle * (time.monotonic() - at)
            settings = {
                "prompts_per_step": prompts, "num_generations": task.generations, "max_completion_length": task.tokens,
                "budget": {"max_steps": task.steps}, "optimizer": {"lr": 1e-5}, "reward": ["policy_rewards:digits"],
            }  # fmt: skip
            rig = Bare("grpo", Start(Path(task.model), 0.0), root / f"bare-{prompts}", settings)
            list(rig.steps(rig.trainer(), 0, task.steps))
            rig.close()
            bare[prompts] = statistics.median(waits[task.warm :])
    each, alone = ((one[many] - one[few]) / (many - few) * 1000 for one in (product, bare))
    ours_only = (used[many] - used[few]) / (many - few) / task.steps * 1000
    return [
        Row(
            f"processor time of one more group, {task.generations} samples of a token, tiny model, without engines",
            f"{ours_only:.1f} ms; a group {each:.1f}, bare {alone:.1f} ms; steps of {few} groups "
            f"{product[few] * 1000:,.0f}, bare {bare[few] * 1000:,.0f} ms, of {many} {product[many] * 1000:,.0f}, "
            f"bare {bare[many] * 1000:,.0f} ms",
            "≤3 ms", ours_only <= 3 and each - alone <= 3, {"ms": ours_only, "longer": each - alone},
        )
    ]  # fmt: skip


PARTS: dict[str, Callable[[Path, bool], list[Row]]] = {
    "trl": against_trl, "workers": workers, "lag": lag, "switch": switch, "ledger": ledger,
}  # fmt: skip


def measured(quick: bool, only: str | None = None) -> list[Row]:
    found: list[Row] = []
    for name, part in PARTS.items():
        if only in (None, name):
            with directory() as root:
                found += part(root, quick)
    return found


def rows(quick: bool) -> list[Row]:
    """For report.py."""
    return measured(quick)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--only", choices=PARTS, help="a part of it")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--trl", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl:
        import torch

        torch.set_num_threads(1)
        print(trl_loop(Task(**json.loads(given.trl))))
    else:
        every = measured(given.quick, given.only)
        if given.json:
            print(
                json.dumps(
                    [{"what": row.what, "figure": row.figure, "reached": row.reached, **row.values} for row in every]
                )
            )
        else:
            for row in every:
                print(f"{row.what}: {row.figure}{f' (target {row.target}: {row.verdict})' if row.target else ''}")
