"""Training, step by step: what every algorithm shares. One per rank; all ranks do the same steps.

The step counter belongs to whoever calls: `run(first, steps)` does those steps and nothing is remembered of which came
before but the state itself.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rollout.model.errors import AttemptError, ObjectCorruptError
from rollout.workloads.train.config import Kind, PreferenceSection, SftSection, TrainingSection
from rollout.workloads.train.dataset import Dataset
from rollout.workloads.train.sampler import step_rows, total_rows
from torch import Tensor

from rollout_worker.algorithms.port import Algorithm, Batch, Loss
from rollout_worker.backends.training import state as files
from rollout_worker.backends.training.collate import Collator
from rollout_worker.backends.training.models import StepModels, load_model, model_files, parameters, with_adapter
from rollout_worker.backends.training.optimizer import follow_settings, make_optimizer, make_schedule

EXPLODED = 20.0
"""A loss so many times the first one's size ends the run: nothing good comes after it."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a trainer is made of. `model`, `reference`, `tokenizer`: directories or Hugging Face names."""

    kind: Kind
    settings: TrainingSection
    data: Path
    model: str
    pad: int
    reference: str | None = None
    eval_data: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps of the whole run."""

    units: int
    batch: int
    total: int  # units drawn in all
    steps: int


def plan_of(settings: TrainingSection, units: int) -> Plan:
    """ValueError: there is no data."""
    if not units:
        raise ValueError("no row is left to train on")
    batch = settings.step_rows
    if settings.budget.max_steps is not None:
        return Plan(units, batch, settings.budget.max_steps * batch, settings.budget.max_steps)
    total = total_rows(units, settings.budget.epochs or 1)
    return Plan(units, batch, total, -(-total // batch))


class Trainer:
    """`start` or `restore`, then `run` and `save` as often as need be."""

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        self.job = job
        settings = self.settings = job.settings
        self.algorithm = algorithm
        self.data = Dataset.load(job.data)
        self.plan = plan_of(settings, self.data.units)
        self.accelerator = Accelerator(
            mixed_precision="bf16" if settings.precision == "bf16" else "no",
            cpu=settings.device == "cpu" or not torch.cuda.is_available(),
        )
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        packed = isinstance(settings, SftSection) and settings.packing is not None and settings.packing.kind != "off"
        self.collator = Collator(self.data, job.pad, self.accelerator.device, packed=packed)
        self.step = 0
        self.tokens = 0
        self.first_loss = 0.0
        self._model_files = model_files(job.model, settings.base_model.revision)
        self._build()

    # ---- building

    def _build(self) -> None:
        settings, job = self.settings, self.job
        files.seed_everything(settings.seed, 0)
        model: Any = load_model(job.model, settings, self.algorithm.head)
        reference = self._reference(model)
        if settings.lora is not None:
            model = with_adapter(model, settings.lora, self.algorithm.head)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.parameters = parameters(model)
        if settings.compile:
            model = torch.compile(model)
        optimizer = make_optimizer(model, settings.optimizer)
        self.schedule = make_schedule(optimizer, settings.optimizer, self.plan.steps)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if reference is not None:
            reference = reference.to(self.accelerator.device)
        off = isinstance(settings, PreferenceSection) and settings.reference == "base" and settings.lora is not None
        self.models = StepModels(
            self.model,
            reference,
            adapter_off=off,
            unwrap=self.accelerator.unwrap_model,
            autocast=self.accelerator.autocast,
        )
        files.seed_everything(settings.seed, self.rank)

    def _reference(self, model: torch.nn.Module) -> torch.nn.Module | None:
        settings = self.settings
        if not isinstance(settings, PreferenceSection) or settings.reference == "free":
            return None
        if self.job.reference is not None:
            reference = load_model(self.job.reference, settings, self.algorithm.head)
        elif settings.lora is not None:
            return None
        else:
            reference = deepcopy(model)
        return reference.eval().requires_grad_(False)

    # ---- steps

    def units_of(self, step: int) -> list[int]:
        found = step_rows(self.plan.units, self.settings.seed, step, self.plan.batch, self.plan.total)
        return [int(unit) for unit in found]

    def run(self, first: int, steps: int) -> Iterator[dict[str, Any]]:
        """The metrics of each step from `first` on, under TRL's names, counted from 1.

        AttemptError: `loss_not_finite`, `loss_exploded`, both with the rows; `out_of_memory` with the batch's shape.
        """
        if self.step != first:
            raise AttemptError(f"the model stands at step {self.step} and not at {first}", code="wrong_position")
        for step in range(first, min(first + steps, self.plan.steps)):
            began = time.perf_counter()
            metrics = self._step(step)
            self.step = step + 1
            yield {"step": self.step, **metrics, "seconds": round(time.perf_counter() - began, 6)}

    def _step(self, step: int) -> dict[str, Any]:
        units = self.units_of(step)
        share = self.settings.minibatch_size
        mine = [
            units[(m * self.world + self.rank) * share :][:share] for m in range(self.settings.gradient_accumulation)
        ]
        divisor = self.collator.divisor(units, per_token=self.algorithm.per_token)
        self.model.train()
        self._prepare(mine, units)
        lr = self.schedule.get_last_lr()[0]
        sums = _Sums()
        try:
            for number, part in enumerate(mine):
                last = number + 1 == len(mine)
                with nullcontext() if last else self.accelerator.no_sync(self.model):
                    self._minibatch(part, units, divisor, sums)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(mine) from error
        norm = self.accelerator.clip_grad_norm_(
            self.model.parameters(), self.settings.optimizer.max_grad_norm or math.inf
        )
        found = sums.reduced(self.accelerator, divisor)
        loss = found.pop("loss")
        grad_norm = float(norm) if norm is not None else 0.0
        self._check(step, loss, grad_norm, units)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.collator.tokens(units)
        self.tokens += tokens
        return {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": tokens, "num_tokens": self.tokens, **found}

    def _minibatch(self, part: list[int], units: list[int], divisor: int, sums: _Sums) -> None:
        empty = not part  # of the last step: this rank has no rows, and must go through the motions with the others
        batch = self.collator.batch(part or units[:1])
        with self.accelerator.autocast():
            loss = self.algorithm.loss(self.models, batch)
        # The gradients of ranks are averaged, and the divisor is that of all of them.
        scaled = loss.sum * (0.0 if empty else self.world / max(divisor, 1))
        self.accelerator.backward(scaled)
        if not empty:
            sums.add(loss)

    def _prepare(self, mine: list[list[int]], units: list[int]) -> None:
        if self.algorithm.rows != "unpaired":
            return
        training = self.model.training
        self.model.eval()
        partners: list[Batch] = [self.collator.mismatched(part, units) for part in mine if part]
        with torch.no_grad(), self.accelerator.autocast():
            self.algorithm.prepare(self.models, partners, len(units), self._all_reduce)
        self.model.train(training)

    def _all_reduce(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value.to(self.accelerator.device), "sum")  # pyright: ignore[reportReturnType]

    def _check(self, step: int, loss: float, grad_norm: float, units: list[int]) -> None:
        rows = self.collator.numbers(units)
        named = ", ".join(map(str, rows[:20])) + (f" and {len(rows) - 20} more" if len(rows) > 20 else "")
        where = f"at step {step + 1}, which trains on the rows {named}"
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise AttemptError(
                f"the loss is {loss} and the gradient's norm {grad_norm} {where}: lower optimizer.lr, or look at these "
                "rows",
                code="loss_not_finite",
                retry=False,
            )
        if step == 0:
            self.first_loss = abs(loss)
        elif abs(loss) > EXPLODED * max(self.first_loss, 0.1):
            raise AttemptError(
                f"the loss is {loss:.4g}, {EXPLODED:.0f} times the first one's {self.first_loss:.4g}, {where}: lower "
                "optimizer.lr",
                code="loss_exploded",
                retry=False,
            )

    def _out_of_memory(self, mine: list[list[int]]) -> AttemptError:
        longest = max(self.collator.tokens([unit]) for part in mine for unit in part)
        return AttemptError(
            f"out of memory with a minibatch of {self.settings.minibatch_size} rows, the longest of {longest} tokens: "
            "lower minibatch_size (and raise gradient_accumulation as much), or max_length, or set "
            "gradient_checkpointing = true",
            code="out_of_memory",
            retry=False,
        )

    # ---- evaluation

    def evaluate(self) -> dict[str, float] | None:
        """Means over all rows of the evaluation set, under the same names; None: there is none."""
        if self.job.eval_data is None:
            return None
        data = Dataset.load(self.job.eval_data)
        collator = Collator(data, self.job.pad, self.accelerator.device, packed=False)
        sums, divisor = _Sums(), 0
        share = self.settings.minibatch_size
        units = list(range(data.units))
        self.model.eval()
        with torch.no_grad():
            for at in range(self.rank * share, len(units), share * self.world):
                part = units[at : at + share]
                if self.algorithm.rows == "unpaired":
                    partners = [collator.mismatched(part, part)]
                    self.algorithm.prepare(self.models, partners, len(part), lambda value: value)
                with self.accelerator.autocast():
                    sums.add(self.algorithm.loss(self.models, collator.batch(part)))
        divisor = collator.divisor(units, per_token=self.algorithm.per_token)
        return sums.reduced(self.accelerator, divisor)

    # ---- state

    def capture(self, extra: dict[str, Any]) -> files.Captured | None:
        """The state, with `extra` in its manifest. On every rank at once; rank 0 has it, the others have None."""
        weights = {name: files.plain(value) for name, value in self._weights().items()}
        tensors, rest = files.capture_optimizer(self.optimizer.state_dict())
        randoms: list[files.Random] = gather_object([files.capture_random()])
        if self.rank:
            return None
        position = {"step": self.step, "tokens": self.tokens, "first_loss": self.first_loss}
        manifest = {**extra, "position": position}
        return files.Captured(manifest, weights, tensors, rest, _schedule_state(self.schedule), randoms, self._files())

    def _files(self) -> dict[str, bytes]:
        if self.settings.lora is None:
            return self._model_files
        model: Any = self.accelerator.unwrap_model(self.model)
        found: dict[str, Any] = model.peft_config["default"].to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}  # pyright: ignore
        adapter = json.dumps(plain, sort_keys=True, indent=1, default=str).encode()
        return {**self._model_files, "adapter_config.json": adapter}

    def restore(self, directory: Path) -> None:
        """The state that `save` wrote. ObjectCorruptError: it is of another model."""
        self._load_weights(files.load_weights(directory))
        self.optimizer.load_state_dict(files.load_optimizer(directory))
        lambdas = {"lr_lambdas": [None] * len(self.optimizer.param_groups)}  # functions are as they were built
        self.schedule.load_state_dict(files.read_json(directory / "schedule.json") | lambdas)
        follow_settings(self.optimizer, self.schedule, self.settings.optimizer)
        position = files.read_json(directory / files.MANIFEST)["position"]
        self.step, self.tokens, self.first_loss = position["step"], position["tokens"], position["first_loss"]
        files.load_random(directory, self.rank)

    def start(self) -> None:
        """Step 0, of the model that `Job.model` names. A trainer that was used is built anew."""
        self.accelerator.free_memory()
        self.step, self.tokens, self.first_loss = 0, 0, 0.0
        self._build()

    def _weights(self) -> dict[str, Tensor]:
        """Those that are trained: of an adapter, only its own."""
        whole: dict[str, Tensor] = self.accelerator.get_state_dict(self.model)  # pyright: ignore[reportAssignmentType]
        model: Any = self.accelerator.unwrap_model(self.model)
        if self.settings.lora is not None:
            trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
            return {name: value for name, value in whole.items() if name in trained}
        keys: Any = (
            getattr(model, "_tied_weights_keys", None) if getattr(model.config, "tie_word_embeddings", False) else ()
        )
        tied = set(keys or ())  # the embeddings, under a second name
        return {name: value for name, value in whole.items() if name not in tied}

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        model: Any = self.accelerator.unwrap_model(self.model)
        found = model.load_state_dict(weights, strict=False)
        wanted = self._weights().keys()
        if found.unexpected_keys or wanted != weights.keys():
            other = sorted(found.unexpected_keys or wanted ^ weights.keys())[:3]
            raise ObjectCorruptError(f"the snapshot is of another model: it differs in {', '.join(other)}")


def _schedule_state(schedule: Any) -> dict[str, Any]:
    whole = schedule.state_dict()
    return {key: whole[key] for key in ("last_epoch", "_step_count", "_last_lr")}


class _Sums:
    """Of the micro-batches of one step, on this rank."""

    def __init__(self) -> None:
        self._loss = torch.zeros(())
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._least: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> None:
        self._loss = self._loss + loss.sum.detach().float().cpu()
        for name, (above, below) in loss.metrics.items():
            old = self._sums.get(name, (torch.zeros(()), torch.zeros(())))
            self._sums[name] = (old[0] + above.float().cpu(), old[1] + below.float().cpu())
        for name, value in loss.least.items():
            self._least[name] = torch.minimum(self._least.get(name, value.cpu()), value.cpu())
        for name, value in loss.most.items():
            self._most[name] = torch.maximum(self._most.get(name, value.cpu()), value.cpu())

    def reduced(self, accelerator: Accelerator, divisor: int) -> dict[str, float]:
        """Over all ranks. Every rank has the same names: a rank without rows has none, and must not be first."""
        names = sorted(self._sums)
        flat = torch.stack([self._loss, *(part for name in names for part in self._sums[name])]).to(accelerator.device)
        total: Any = accelerator.reduce(flat, "sum").cpu() if accelerator.num_processes > 1 else flat.cpu()
        result = {"loss": float(total[0]) / max(divisor, 1)}
        for i, name in enumerate(names):
            above, below = float(total[1 + 2 * i]), float(total[2 + 2 * i])
            if below:
                result[name] = above / below
        return result | {name: float(value) for name, value in (self._least | self._most).items()}
