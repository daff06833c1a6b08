"""Facts of runs with a known truth: tasks that differ in difficulty, variants that differ by so much, flaky tasks,
trials that are missing, and slots that were pruned.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Truth:
    """A variant: `shift` of the log odds of every task, the chance that a trial is lost to the infrastructure, that its
    agent fails, and the schedule index from which its slots are pruned."""

    shift: float = 0.0
    lost: float = 0.0
    crash: float = 0.0
    pruned_from: int | None = None
    cost: float = 0.01
    bindings: dict[str, Any] = field(default_factory=dict)


def rate(difficulty: float, shift: float) -> float:
    return 1 / (1 + math.exp(difficulty - shift))


def make_facts(
    run: Path,
    variants: dict[str, Truth],
    *,
    tasks: int = 20,
    replications: int = 3,
    seed: int = 1,
    spread: float = 1.5,
    comparison: str = "paired",
    experiment_id: str = "exp",
    run_id: str = "01K9ABCDEFGHJKMNPQRSTVWXYZ",
    created_at: str = "2026-11-01T00:00:00.000Z",
    primary: dict[str, str] | None = None,
    margin: float | None = None,
    files: bool = False,
    events: bool = True,
) -> Path:
    """Write `run`/facts and return `run`. The log odds of the tasks are normal with `spread`: 0 makes them alike, a
    large one makes trials of one task agree. Variants are tried in the order paired_interleaved (task, variant,
    replication). `files`: the trials' directories, too."""
    facts = run / "facts"
    facts.mkdir(parents=True)
    names = list(variants)
    manifest = {
        "schema_version": "run_manifest_v1",
        "run_id": run_id,
        "experiment_id": experiment_id,
        "name": run.name,
        "created_at": created_at,
        "resolved_digest": hashlib.sha256(repr(variants).encode()).hexdigest(),
        "rollout_version": "0.1.0",
        "design": {
            "comparison": comparison,
            "order": "paired_interleaved",
            "replications": replications,
            "seed": seed,
            "max_concurrency": 4,
        },
        "baseline": names[0],
        "variants": [
            {"variant_id": name, "baseline": name == names[0], "image": None, "bindings": variants[name].bindings}
            for name in names
        ],
        "tasks": tasks,
        "total_slots": tasks * len(names) * replications,
        "state_policy": "isolate_per_trial",
        "primary_metric": primary or {"name": "score", "direction": "maximize"},
        "thresholds": {"pass": 1.0} | ({} if margin is None else {"non_inferiority_margin": margin}),
        "volatile_fields": ["worker_id", "started_at", "ended_at", "duration_ms"],
    }
    (facts / "run_manifest.json").write_text(json.dumps(manifest))
    made = ("trials", "metrics_long", "events", "variant_snapshots")
    out = {name: (facts / f"{name}.jsonl").open("w") for name in made}
    try:
        for index, trial in enumerate(_trials(variants, tasks, replications, seed, spread)):
            _write(out, manifest, variants, index, trial, events)
            if files:
                _files(run, f"trial_{index + 1:06d}")
    finally:
        for file in out.values():
            file.close()
    return run


def _trials(
    variants: dict[str, Truth], tasks: int, replications: int, seed: int, spread: float
) -> Iterator[tuple[str, str, int, str, bool]]:
    """(task, variant, replication, what happened, passed)."""
    generator = random.Random(seed)
    for task in range(tasks):
        difficulty = generator.gauss(0, spread)
        for name, truth in variants.items():
            for replication in range(replications):
                chance, drawn = generator.random(), generator.random()
                end = "lost" if chance < truth.lost else "crash" if chance < truth.lost + truth.crash else "ran"
                yield f"task-{task:04d}", name, replication, end, drawn < rate(difficulty, truth.shift)


def _write(
    out: dict[str, Any],
    manifest: Row,
    variants: dict[str, Truth],
    index: int,
    trial: tuple[str, str, int, str, bool],
    events: bool,
) -> None:
    task, variant, replication, end, passed = trial
    truth = variants[variant]
    if truth.pruned_from is not None and index >= truth.pruned_from:
        end = "pruned"
    key = {
        "run_id": manifest["run_id"],
        "schedule_index": index,
        "slot_commit_id": hashlib.sha256(f"{manifest['resolved_digest']}{index}".encode()).hexdigest(),
        "attempt": 1,
    }
    named = {"trial_id": f"trial_{index + 1:06d}", "variant_id": variant, "task_id": task}
    status = {"pruned": "skipped_pruned", "ran": "completed"}.get(end, "failed")
    kind = {"lost": "environment_lost", "crash": "agent_execution_failed"}.get(end)
    message = {
        "lost": f"worker 01K9{index:022d} was lost after {index % 97}.5 s",
        "crash": f'exit code {index % 3}: "{task}" in /work/{task}/main.py line {index}',
    }.get(end)
    lowest = manifest["primary_metric"] == {"name": "score", "direction": "minimize"}
    crashed = 0.0 if end == "crash" and not lowest else None
    row = key | {"row_sequence": 0} | named | {
        "repl_idx": replication,
        "chain_id": f"{variant}/{task}",
        "baseline": variant == manifest["baseline"],
        "status": status,
        "outcome": "missing" if end in ("lost", "pruned") else "error" if end == "crash" else "success",
        "classification": kind,
        "exit_status": None if end == "pruned" else int(end == "crash"),
        "grade_exit_status": 0 if end == "ran" else None,
        "score": float(passed) if end == "ran" else crashed,
        "passed": passed if end == "ran" else False if end == "crash" else None,
        "objective_name": None,
        "objective_value": None,
        "answer_sha256": hashlib.sha256(f"{task}{passed}".encode()).hexdigest() if end == "ran" else None,
        "image": "debian:12",
        "tokens_in": 1000 + index % 100 if end == "ran" else None,
        "tokens_out": 200 if end == "ran" else None,
        "cost_usd": truth.cost * (1 + index % 5) if end == "ran" else None,
        "error_message": message,
        "worker_id": "w1",
        "started_at": "2026-11-01T00:00:00.000Z",
        "ended_at": "2026-11-01T00:00:10.000Z",
        "duration_ms": 1000.0 + index % 1000,
    }  # fmt: skip
    out["trials"].write(json.dumps(row) + "\n")
    if end == "ran":
        for sequence, (name, value) in enumerate((("steps", 3.0 + index % 7), ("coverage", float(passed) * 0.9))):
            metric = {"metric_name": name, "metric_value": value, "source": "agent"}
            line = key | {"row_sequence": sequence} | named | {"repl_idx": replication} | metric
            out["metrics_long"].write(json.dumps(line) + "\n")
    if events:
        event = {"event_type": end, "payload": {"index": index}}
        out["events"].write(json.dumps(key | {"row_sequence": 0} | named | event) + "\n")
    for sequence, (name, value) in enumerate(truth.bindings.items()):
        bound = {"binding_name": name, "binding_value": value, "binding_text": str(value)}
        line = key | {"row_sequence": sequence, "trial_id": named["trial_id"], "variant_id": variant} | bound
        out["variant_snapshots"].write(json.dumps(line) + "\n")


def _files(run: Path, trial_id: str) -> None:
    directory = run / "trials" / trial_id
    directory.mkdir(parents=True)
    for name in ("stdout.log", "stderr.log", "result.json", "trial_input.json"):
        (directory / name).write_text("{}\n")
