"""Small jobs of training: rows, a tiny model, and the trainer that a worker's process would make of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from rollout.workloads.train.config import SECTIONS, Kind, TrainingSection
from rollout.workloads.train.dataset import build
from rollout.workloads.train.encode import FAULTS, Encoder
from rollout.workloads.train.policy_config import PolicySection
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.report import Place
from rollout.workloads.train.rows import parse_row
from rollout.workloads.train.templates import find_template
from rollout_worker.algorithms.registered import make_algorithm, make_policy_algorithm
from rollout_worker.backends.training import state as files
from rollout_worker.backends.training.critic_trainer import CriticTrainer
from rollout_worker.backends.training.determinism import environment, make_deterministic
from rollout_worker.backends.training.policy_trainer import PolicyTrainer, Row
from rollout_worker.backends.training.trainer import Job, JudgeOf, RowTrainer, Trainer
from rollout_worker.backends.training.versions import Versions
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

PAIRS = [{"prompt": f"{n} is", "chosen": f" {n}" * (1 + n % 3), "rejected": " no" * (1 + n % 2)} for n in range(9)]
ROWS: dict[Kind, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}, even" * (1 + n % 4)} for n in range(9)],
    "rm": PAIRS,
    "dpo": PAIRS,
    "ipo": PAIRS,
    "kto": [{"prompt": f"{n} is", "completion": f" {n}" * (1 + n % 4), "label": n % 3 > 0} for n in range(9)],
}
"""Of uneven lengths, and not a whole number of steps."""

DEFAULTS: dict[str, Any] = {"minibatch_size": 4, "gradient_accumulation": 2, "device": "cpu", "seed": 3}
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "schedule": "cosine", "eps": 1e-4}
"""Not Adam's 1e-8: where a gradient is all but 0, the sign of what rounding leaves of it would be a whole step."""


def settings_of(kind: Kind, model: Path, **more: Any) -> TrainingSection:
    """Two epochs of nine rows, eight a step: the second step holds the seam, and the last has two rows."""
    # KTO's pairs have an effect once its divergence is above 0: with this, from the second step on.
    optimizer = OPTIMIZER | ({"kind": "sgd", "lr": 0.03} if kind == "kto" else {}) | more.pop("optimizer", {})
    values = DEFAULTS | {"base_model": str(model), "dataset": {"path": "rows.jsonl"}, "budget": {"epochs": 2}} | more
    if issubclass(SECTIONS[kind], PolicySection):
        values |= {"gradient_accumulation": 1, "budget": {"max_steps": 3}}
    return SECTIONS[kind].model_validate(values | {"optimizer": optimizer})


def tokens(
    kind: Kind, model: Path, path: Path, rows: list[dict[str, Any]] | None = None, pack: int | None = None
) -> Path:
    """The dataset's file, made if it is not there."""
    if not path.exists() and issubclass(SECTIONS[kind], PolicySection):
        Prompts.save((Prompt(n, [5 + n, 6], f"{n}", {}) for n in range(1, 10)), path)
    elif not path.exists():
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        encoder = Encoder(tokenizer, find_template(tokenizer, None), 256)
        encoded = [
            (Place(i, "rows", i), encoder.encode(row))
            for i, value in enumerate(rows or ROWS[kind], 1)
            for row in parse_row(kind, value)
        ]
        build(encoded, dict.fromkeys(FAULTS, "error"), pack)[0].save(path)
    return path


MANIFEST: dict[str, Any] = {"format": 1, "kind": "train_state", "data": {"pad": 0}}


@dataclass
class Done:
    """`metrics` but for the time; `weights` by their names in the snapshot's directory `state`."""

    metrics: list[dict[str, Any]]
    evaluation: dict[str, float] | None
    state: Path
    held: list[float]
    """Shares of the weights that one process holds, of the policy and of a reference."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Done:
        told = json.loads((directory / "told.json").read_text())
        state = directory / "state"
        return cls(told["metrics"], told["evaluation"], state, told["held"], files.load_weights(state))


def forget_accelerator() -> None:
    """A worker's process has one trainer; these have many, whose precisions differ."""
    AcceleratorState._reset_state()
    if PartialState._shared_state.get("distributed_type") is DistributedType.FSDP:
        PartialState().distributed_type = DistributedType.MULTI_CPU


class GivenSamples:
    """An exchange whose samples are a function of the step: three prompts with two each, of which one was cut short."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.versions = Versions(0, dtype)

    def begin(self, directory: Path, versions: Mapping[int, Mapping[str, str]]) -> None: ...

    def rollouts(self, step: int) -> list[Row]:
        numbers = np.random.default_rng(step)
        rows: list[Row] = []
        for place in range(6):
            ids: list[int] = numbers.integers(5, 60, 2 + (3 * place + step) % 5).tolist()
            reward = float(numbers.integers(0, 4))
            rows.append(Row(
                place // 2, place // 2 + 1, [5 + place // 2, 6], ids, [-4.0] * len(ids), "stop" if place else "length",
                {"any": reward}, reward, version=step,
            ))  # fmt: skip
        return rows

    def evaluation(self, step: int) -> list[Row]:
        return self.rollouts(step)


def any_trainer_of(kind: Kind, settings: TrainingSection, data: Path, reference: str | None = None) -> Trainer:
    if not isinstance(settings, PolicySection):
        return trainer_of(kind, settings, data, reference)
    forget_accelerator()
    torch.set_num_threads(1)
    judges = tuple(JudgeOf(one.name, one.weight, one.model) for one in settings.reward if one.model is not None)
    job = Job(kind, settings, data, settings.base_model.uri, pad=0, eval_data=data, judges=judges)
    made = CriticTrainer if kind == "ppo" else PolicyTrainer
    return made(job, make_policy_algorithm(settings), lambda trainer: GivenSamples(torch.float32))


def trainer_of(kind: Kind, settings: TrainingSection, data: Path, reference: str | None = None) -> RowTrainer:
    forget_accelerator()
    torch.set_num_threads(1)
    job = Job(kind, settings, data, settings.base_model.uri, pad=0, reference=reference, eval_data=data)
    return RowTrainer(job, make_algorithm(kind, settings))


def train(
    kind: Kind, settings: TrainingSection, data: Path, directory: Path, *, reference: str | None = None, steps: int = 99
) -> Done | None:
    """All steps, or so many, with the state at the end in `directory`. None: this is not the first process."""
    trainer = any_trainer_of(kind, settings, data, reference)
    metrics = [
        {key: value for key, value in one.items() if not key.startswith("seconds")} for one in trainer.run(0, steps)
    ]
    evaluation = trainer.evaluate()
    captured = trainer.capture(MANIFEST | {"algorithm": kind})
    if captured is None:
        return None
    directory.mkdir(parents=True)
    files.write(captured, directory / "state")
    held = [_held(model) for model in (trainer.plain, trainer.models._reference) if model is not None]
    (directory / "told.json").write_text(json.dumps({"metrics": metrics, "evaluation": evaluation, "held": held}))
    return Done.read(directory)


def _held(model: torch.nn.Module) -> float:
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() for p in local) / sum(p.numel() for p in model.parameters())


def restored(kind: Kind, settings: TrainingSection, data: Path, state: Path, directory: Path) -> Trainer:
    """A trainer that took up `state`, and its own state, written to `directory`."""
    trainer = any_trainer_of(kind, settings, data)
    trainer.restore(state)
    captured = trainer.capture(MANIFEST | {"algorithm": kind})
    if captured is not None:
        files.write(captured, directory)
    return trainer


def _within(name: str, tolerance: float) -> float:
    return 5 * tolerance if name == "grad_norm" else tolerance


def alike(one: Done, other: Done, tolerance: float = 1e-5) -> list[str]:
    """What differs by more than `tolerance` of its size, and of 1 where that is less: empty if nothing does. Norms of
    gradients may differ by more: they are sums of many squares, whose order depends on processes and processor."""
    found = [
        f"step {a['step']}: {name}: {a.get(name)} and {b.get(name)}"
        for a, b in zip(one.metrics, other.metrics, strict=True)
        for name in sorted(a | b)
        if name not in a or name not in b or abs(a[name] - b[name]) > _within(name, tolerance) * max(abs(a[name]), 1.0)
    ]
    before, after = one.evaluation or {}, other.evaluation or {}
    found += [
        f"evaluation: {name}: {before.get(name)} and {after.get(name)}"
        for name in sorted(before | after)
        if name not in before
        or name not in after
        or abs(before[name] - after[name]) > tolerance * max(abs(before[name]), 1.0)
    ]
    if one.weights.keys() != other.weights.keys():
        return [*found, f"weights: {sorted(one.weights.keys() ^ other.weights.keys())}"]
    for name, tensor in one.weights.items():
        difference = (tensor - other.weights[name]).abs()
        if float(difference.max()) > tolerance or float(difference.mean()) > tolerance / 10:
            found.append(f"weights: {name}: {float(difference.max()):.2g}")
    return found


def same_bytes(one: Path, other: Path) -> bool:
    def content(directory: Path) -> dict[str, bytes]:
        return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}

    return content(one) == content(other)


def main(arguments: list[str]) -> None:
    """Of each process of a group: the jobs of a file, one after the other, each into a directory of its name.

    `again`: then another trainer takes up the state and writes its own; `on`: and trains to the end, and writes that.
    """
    jobs: list[dict[str, Any]] = json.loads(Path(arguments[0]).read_text())
    for one in jobs:
        kind, out, data = cast(Kind, one["kind"]), Path(one["out"]), Path(one["data"])
        settings = SECTIONS[kind].model_validate(one["settings"])
        train(kind, settings, data, out, steps=one["steps"])
        if one["again"]:
            torch.distributed.barrier()
            trainer = restored(kind, settings, data, out / "state", out / "again")
            if one["again"] == "on":
                for _ in trainer.run(trainer.step, 99):
                    pass
                captured = trainer.capture(MANIFEST | {"algorithm": kind})
                if captured is not None:
                    files.write(captured, out / "on")
    torch.distributed.destroy_process_group()


def job(
    kind: Kind, settings: TrainingSection, data: Path, out: Path, *, steps: int = 99, again: str = ""
) -> dict[str, Any]:
    """A line of the file that `main` reads."""
    values = {"kind": kind, "settings": settings.model_dump(mode="json"), "data": str(data), "out": str(out)}
    return values | {"steps": steps, "again": again}


@contextmanager
def processes(count: int, jobs: list[dict[str, Any]], directory: Path) -> Iterator[None]:
    """They do the jobs meanwhile, and have done them at the end."""
    plan = directory / "jobs.json"
    plan.write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    place |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            own = os.environ | environment(1) | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-W", "error", __file__, str(plan)]
            started.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
        yield
        told = [process.communicate(timeout=300)[1] for process in started]
        assert [process.returncode for process in started] == [0] * count, "\n".join(told)
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


if __name__ == "__main__":
    make_deterministic(1)
    main(sys.argv[1:])
