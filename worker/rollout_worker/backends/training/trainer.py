"""Training, step by step: what every algorithm shares. There is one trainer per rank, and all ranks do the same steps.

The caller counts the steps: `run(first, steps)` does those steps, and remembers nothing of earlier ones except the
state.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import accelerate.utils
import torch
from rollout.model.errors import AttemptError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.config import Kind, SftSection, TrainingSection
from rollout.workloads.train.dataset import Dataset
from rollout.workloads.train.memory import flops_per_token
from rollout.workloads.train.sampler import step_rows
from rollout.workloads.train.steps import total_rows
from torch import Tensor

from rollout_worker.algorithms.port import Algorithm, Batch
from rollout_worker.backends.training import state as files
from rollout_worker.backends.training.collate import Collator, partner
from rollout_worker.backends.training.faults import LESS_MEMORY, ran_out_of_memory
from rollout_worker.backends.training.model_files import ModelFiles, base_of_adapter
from rollout_worker.backends.training.models import (
    StepModels,
    adapter_file,
    checkpoint_activations,
    detach_from_files,
    load_model,
    parameters,
    with_adapter,
)
from rollout_worker.backends.training.optimizer import follow_settings, make_optimizer, make_schedule
from rollout_worker.backends.training.packing import check_packing
from rollout_worker.backends.training.parallel import make_accelerator, prepare, prepare_frozen, whole
from rollout_worker.backends.training.probe import EXACT, ROUNDED, Probe, probe, probe_batch
from rollout_worker.backends.training.speed import peak, speed
from rollout_worker.backends.training.sums import Sums
from rollout_worker.backends.training.weights import capture_weights, load_weights, shared_optimizer, whole_optimizer

EXPLODED = 20.0
"""A loss that exceeds the first one (at least 1) by this factor ends the run: it will not recover."""


@dataclass(frozen=True, slots=True)
class JudgeOf:
    """A reward model: the name of its reward, its weight in the sum, and its directory or Hugging Face name."""

    name: str
    weight: float
    model: str


@dataclass(frozen=True, slots=True)
class Job:
    """What a trainer needs. `model`, `reference` and `tokenizer` are directories or Hugging Face names; the last two
    are None if they are the model's. `judges` score samples of the policy."""

    kind: Kind
    settings: TrainingSection
    data: Path
    model: str
    pad: int
    reference: str | None = None
    eval_data: Path | None = None
    tokenizer: str | None = None
    judges: tuple[JudgeOf, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of the whole run."""

    units: int
    batch: int
    total: int  # units drawn in all
    steps: int


def plan_of(settings: TrainingSection, units: int) -> Plan:
    """Return the plan. Raises ValueError if there is no data."""
    if not units:
        raise ValueError("no row is left to train on")
    batch = settings.step_rows
    if settings.budget.max_steps is not None:
        return Plan(units, batch, settings.budget.max_steps * batch, settings.budget.max_steps)
    total = total_rows(units, settings.budget.epochs or 1)
    return Plan(units, batch, total, -(-total // batch))


class Trainer(ABC):
    """A new trainer is at step 0 of its job's model. Then call `restore`, `run` and `capture` as needed."""

    head: Literal["language_model", "score"] = "language_model"

    def __init__(self, job: Job) -> None:
        self.job = job
        settings = self.settings = job.settings
        self.plan = plan_of(settings, (data := self._load_data(job.data)).units)
        # accelerate's types are partly unknown.
        self.accelerator: Any = make_accelerator(settings)
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.collator = self._collator(data)
        self.evaluation = self._collator(self._load_data(job.eval_data)) if job.eval_data is not None else None
        self.step = 0
        self.tokens = 0
        self.first_loss = 0.0
        self.speed: JsonObject = {}
        """Speed of the last step: tokens_per_second, and mfu if the device's peak is known."""
        self._model_files = self._files_of(job, data)
        self._build()
        self._try_packing()
        files.seed_everything(settings.seed, self.rank)
        self._flops, self._peak = self._arithmetic(data)

    def _load_data(self, path: Path) -> Dataset:
        return Dataset.load(path)

    @abstractmethod
    def _step(self, step: int) -> dict[str, Any]:
        """Do the step, counted from 0, and return its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float] | None:
        """Return means over all rows of the evaluation set, under the same names, or None if there is none."""

    def begin(self, directory: Path | None, versions: Mapping[int, Mapping[str, str]]) -> None:
        """Prepare for the steps of a segment. `directory` is for files to and from the executor. `versions` are files,
        by tensor, of earlier versions of the policy that samples may have."""
        return

    def told(self) -> JsonObject:
        """Return what to report of the last step besides its metrics."""
        return {}

    def _files_of(self, job: Job, data: Dataset) -> ModelFiles:
        base, scored = self.settings.base_model, [data] if self.head == "score" else []
        if scored and self.evaluation is not None:
            scored.append(self.evaluation.data)
        return ModelFiles(
            job.model,
            base.revision,
            tokenizer=job.tokenizer,
            chat_template=base.chat_template,
            adapter=self.settings.lora is not None,
            scored=scored,
        )

    def _collator(self, data: Dataset) -> Collator:
        settings = self.settings
        sft = settings if isinstance(settings, SftSection) else None
        packed = sft is not None and sft.packed
        longest = sft.length if sft is not None else settings.max_length
        return Collator(data, self.job.pad, self.accelerator.device, packed=packed, longest=longest)

    # ---- building

    def _build(self) -> None:
        settings, job = self.settings, self.job
        files.seed_everything(settings.seed, 0)
        model: Any = self._load(job.model, settings.base_model.revision)
        if base_of_adapter(Path(job.model)) is not None and not model.config.get_text_config().tie_word_embeddings:
            self._model_files.untie()
        reference = self._reference(model)
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
        if settings.lora is not None:
            model = with_adapter(model, settings.lora, self.head)
        model = self._assembled(model)
        self.parameters = parameters(model)
        if settings.compile:
            model.compile()
        optimizer = make_optimizer(model, settings.optimizer, sharded=settings.strategy == "fsdp")
        self.schedule = make_schedule(optimizer, settings.optimizer, self.plan.steps)
        self.model, self.optimizer = prepare(self.accelerator, model, optimizer)
        self.plain: Any = self.accelerator.unwrap_model(self.model)
        self.model.train()  # whatever its parts were made as
        if reference is not None:
            reference = prepare_frozen(self.accelerator, reference)
        off = settings.compared == "base" and settings.lora is not None
        self.models = StepModels(
            self.model, reference, adapter_off=off, plain=self.plain, autocast=self.accelerator.autocast
        )

    def _assembled(self, model: Any) -> Any:
        """Return the module to train: the policy, and whatever is trained with it."""
        return model

    @property
    def policy(self) -> Any:
        """The policy alone, without wrappers."""
        return self.plain

    def _try_packing(self) -> None:
        if not self.collator.is_packed:
            return
        data = [one.data for one in (self.collator, self.evaluation) if one is not None]
        with self._exact() as policy:
            check_packing(policy, self.plain.config.model_type, self.collator, *data)

    @contextmanager
    def _exact(self) -> Generator[Callable[[Batch], Tensor]]:
        """Yield the policy in float32, without dropout, compilation or a graph. All ranks call it at once."""
        exact = self.settings.attention != "flash_attention_2"  # which has half precision only
        own, training = self.plain.__dict__, self.model.training
        # Of accelerate with autocast, and of torch.compile.
        set_aside = {name: own.pop(name) for name in ("forward",) if exact and name in own}
        set_aside |= {name: own.pop(name) for name in ("_compiled_call_impl",) if name in own}
        self.model.eval()
        try:
            with torch.no_grad():
                yield StepModels(self.plain, None).policy
        finally:
            own.update(set_aside)
            self.model.train(training)

    def _probe(self) -> Probe:
        batch = probe_batch(self.collator, whole=self.head == "score")
        with self._exact() as policy:
            output = policy(batch)
        tolerance = ROUNDED if self.settings.attention == "flash_attention_2" else EXACT
        return probe(output, batch, self._model_files.tokenizer, tolerance)

    def _load(self, name: str, revision: str | None = None) -> torch.nn.Module:
        model = load_model(name, self.settings, self.head, revision)
        if self.accelerator.device.type == "cpu":
            detach_from_files(model)
        return model

    def _reference(self, model: torch.nn.Module) -> torch.nn.Module | None:
        settings = self.settings
        if settings.compared == "free":
            return None
        if self.job.reference is not None:
            reference = self._load(self.job.reference)
        elif settings.lora is not None:
            return None
        else:
            reference = deepcopy(model)
        return reference.eval().requires_grad_(False)

    def _arithmetic(self, data: Dataset) -> tuple[float, float | None]:
        """Return (operations per token, the device's peak operations per second)."""
        config: JsonObject = json.loads(self._model_files.files["config.json"])
        length = len(data.ids) / max(len(data.offsets) - 1, 1)
        flops = flops_per_token(self.job.kind, self.settings, *self.parameters, config, length)
        known = peak(torch.cuda.get_device_name(), self.settings.precision) if self._on_gpu() else None
        return flops, known

    def _on_gpu(self) -> bool:
        return self.accelerator.device.type == "cuda"

    # ---- steps

    def units_of(self, step: int) -> list[int]:
        found = step_rows(self.plan.units, self.settings.seed, step, self.plan.batch, self.plan.total)
        return [int(unit) for unit in found]

    def run(self, first: int, steps: int) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each step from `first` on, under TRL's names, counted from 1.

        Raises AttemptError: `loss_not_finite` and `loss_exploded` with the rows, `out_of_memory` with the batch's
        shape, `compile_failed`.
        """
        if self.step != first:
            raise AttemptError(f"the model stands at step {self.step} and not at {first}", code="wrong_position")
        for step in range(first, min(first + steps, self.plan.steps)):
            began = time.perf_counter()
            try:
                metrics = self._step(step)
            except (RuntimeError, MemoryError) as error:
                if (told := self._explained(error)) is None:
                    raise
                raise told from error
            self.step = step + 1
            seconds = time.perf_counter() - began
            self.speed = speed(metrics["tokens"], seconds, self._flops, self._peak, self.world)
            yield {"step": self.step, **metrics, "seconds": round(seconds, 6)}

    def _shares(self, units: int, rounds: int | None = None) -> list[range]:
        """Return this process's places in a step, by micro-batch. Every process has the same number of micro-batches.
        In the last step some may be empty and still run, because each forward pass involves all processes."""
        size, rounds = self.settings.minibatch_size, rounds or self.settings.gradient_accumulation
        starts = [min((number * self.world + self.rank) * size, units) for number in range(rounds)]
        return [range(start, min(start + size, units)) for start in starts]

    def _gradients(self, parts: Sequence[range], learn: Callable[[range], None]) -> float:
        """`learn` goes backward through one micro-batch. The norm of all gradients, before it is clipped."""
        for number, part in enumerate(parts):
            # Between micro-batches DDP need not talk. FSDP does: whole gradients would take the memory that it saves.
            quiet = number + 1 < len(parts) and not self.accelerator.is_fsdp2
            with self.accelerator.no_sync(self.model) if quiet else nullcontext():
                learn(part)
        clip = self.settings.optimizer.max_grad_norm or math.inf
        return float(whole(self.accelerator.clip_grad_norm_(self.model.parameters(), clip)))

    def _all_reduce(self, value: Tensor) -> Tensor:
        return self.accelerator.reduce(value.to(self.accelerator.device), "sum")

    def _explained(self, error: RuntimeError | MemoryError) -> AttemptError | None:
        """Explain an error of torch that the user can fix, else return None."""
        kind = f"{type(error).__module__}.{type(error).__name__}"
        if self.settings.compile and kind.startswith(("torch._dynamo", "torch._inductor")):
            return AttemptError(
                f"torch.compile failed: {str(error).splitlines()[0]}: it needs a C++ compiler on the worker's host; "
                "install one (g++ or clang), or set compile = false",
                code="compile_failed",
                retry=False,
            )
        if ran_out_of_memory(error):
            return self._out_of_memory()
        if "does not require grad" in str(error):
            where = self._where(self.step, self.units_of(self.step))
            message = f"the loss depends on nothing that is trained {where}: look at lora.target_modules and loss_on"
            return AttemptError(message, code="loss_without_gradient", retry=False)
        return None

    def _where(self, step: int, units: list[int]) -> str:
        rows = self.collator.numbers(units)
        named = ", ".join(map(str, rows[:20])) + (f" and {len(rows) - 20} more" if len(rows) > 20 else "")
        return f"at step {step + 1}, which trains on the rows {named}"

    def _check(self, step: int, loss: float, grad_norm: float, units: list[int]) -> None:
        where = self._where(step, units)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise AttemptError(
                f"the loss is {loss} and the gradient's norm {grad_norm} {where}: lower optimizer.lr, or look at these "
                "rows",
                code="loss_not_finite",
                retry=False,
            )
        if step == 0:
            self.first_loss = abs(loss)

    def _check_size(self, step: int, loss: float, units: list[int]) -> None:
        if step and abs(loss) > EXPLODED * max(self.first_loss, 1.0):
            raise AttemptError(
                f"the loss is {loss:.4g}, more than {EXPLODED:.0f} times the first one's {self.first_loss:.4g}, "
                f"{self._where(step, units)}: lower optimizer.lr",
                code="loss_exploded",
                retry=False,
            )

    def _out_of_memory(self) -> AttemptError:
        units = self.units_of(self.step)
        longest = max(self.collator.tokens([unit]) for unit in units)
        return AttemptError(
            f"out of memory at step {self.step + 1} with a minibatch of {self.settings.minibatch_size} rows, the "
            f"longest of {longest} tokens: {LESS_MEMORY}",
            code="out_of_memory",
            retry=False,
        )

    def agreed(self, wish: bool) -> bool:
        """Return whether any rank wishes it. All ranks call it at once."""
        if self.world == 1:
            return wish
        return bool(self._all_reduce(torch.tensor([float(wish)])).item())

    # ---- state

    def capture(self, extra: dict[str, Any]) -> files.Captured | None:
        """Return the state, with `extra` in its manifest, on rank 0, and None on others. All ranks call it at once."""
        weights = capture_weights(self.policy, keep=self.rank == 0)
        critic = self._capture_critic()
        outputs = self._probe()
        optimizer = whole_optimizer(self.optimizer.state_dict())
        gather: Any = accelerate.utils.gather_object
        randoms: list[files.Random] = gather([files.capture_random()])
        if self.rank:
            return None
        tensors, rest = files.capture_optimizer(optimizer)
        position = {"step": self.step, "tokens": self.tokens, "first_loss": self.first_loss}
        manifest = {**extra, "position": position}
        if self.head == "score":
            manifest["score_pad"] = self._model_files.pad
        schedule, model = _schedule_state(self.schedule), self._files()
        return files.Captured(manifest, weights, tensors, rest, schedule, randoms, model, outputs, critic)

    def _capture_critic(self) -> dict[str, Tensor]:
        """Return the weights that are trained with the policy. All ranks call it at once."""
        return {}

    def _restore_critic(self, directory: Path) -> None:
        return

    def _files(self) -> dict[str, bytes]:
        if self.settings.lora is None:
            return self._model_files.files
        adapter = adapter_file(self.policy, self.settings.base_model.uri, self.head)
        return {**self._model_files.files, "adapter_config.json": adapter}

    def restore(self, directory: Path) -> None:
        """Restore a state that `capture` returned and `files.write` wrote. Raises ObjectCorruptError if it is of
        another model."""
        load_weights(self.policy, files.load_weights(directory))
        self._restore_critic(directory)
        state = files.load_optimizer(directory)
        self.optimizer.load_state_dict(shared_optimizer(state, self.optimizer.param_groups))
        lambdas = {"lr_lambdas": [None] * len(self.optimizer.param_groups)}  # functions are as they were built
        self.schedule.load_state_dict(files.read_json(directory / "schedule.json") | lambdas)
        follow_settings(self.optimizer, self.schedule, self.settings.optimizer)
        position = files.read_json(directory / files.MANIFEST)["position"]
        self.step, self.tokens, self.first_loss = position["step"], position["tokens"], position["first_loss"]
        files.load_random(directory, self.rank)


class RowTrainer(Trainer):
    """The trainer of algorithms that learn from rows: all except those of reinforcement learning."""

    def __init__(self, job: Job, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.head = algorithm.head
        super().__init__(job)

    def _step(self, step: int) -> dict[str, Any]:
        units = self.units_of(step)
        mine = self._shares(len(units))
        divisor = self.collator.divisor(units, per_token=self.algorithm.per_token)
        if not divisor:
            raise AttemptError(
                f"there is no supervised token {self._where(step, units)}: look at loss_on and max_length, or leave "
                'such rows out with rows.no_supervised_token = "drop"',
                code="no_supervised_token",
                retry=False,
            )
        self._compare(self.collator, units, mine)
        if not self.model.training:  # it goes through every module
            self.model.train()
        lr = self.schedule.get_last_lr()[0]
        sums = Sums()
        norm = self._gradients(mine, lambda part: self._minibatch(part, units, divisor, sums))
        found = sums.reduced(self.accelerator, divisor)
        loss = found.pop("loss")
        self._check(step, loss, norm, units)
        self._check_size(step, loss, units)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.collator.tokens(units)
        self.tokens += tokens
        return {"loss": loss, "lr": lr, "grad_norm": norm, "tokens": tokens, "num_tokens": self.tokens, **found}

    def _minibatch(self, part: range, units: Sequence[int], divisor: int, sums: Sums) -> None:
        batch = self.collator.batch([units[place] for place in part or (0,)])
        with self.accelerator.autocast():
            loss = self.algorithm.loss(self.models, batch)
        # The gradients of processes are averaged, and the divisor is that of all of them.
        self.accelerator.backward(loss.sum * (self.world / max(divisor, 1) if part else 0.0))
        sums.add(loss, counts=bool(part))

    def _compare(self, collator: Collator, units: Sequence[int], parts: Sequence[range]) -> None:
        """Compute what an algorithm needs, before a step, from all its rows."""
        if self.algorithm.rows != "unpaired":
            return
        self.model.eval()
        alone = [units[0]]  # a batch of a row and itself, of which nothing is supervised
        partners: list[Batch] = [
            collator.mismatched(part, units) if part else collator.mismatched([0], alone) for part in parts
        ]
        count = sum(partner(units, place) is not None for place in range(len(units)))
        with torch.no_grad(), self.accelerator.autocast():
            self.algorithm.prepare(self.models, partners, count, self._all_reduce)

    def evaluate(self) -> dict[str, float] | None:
        """Return means over all rows of the evaluation set, under the same names, or None if there is none."""
        if (collator := self.evaluation) is None:
            return None
        units, sums = list(range(collator.units)), Sums()
        rounds = -(-len(units) // (self.settings.minibatch_size * self.world))
        parts = self._shares(len(units), rounds)
        self.model.eval()
        with torch.no_grad():
            self._compare(collator, units, parts)
            for part in parts:
                with self.accelerator.autocast():
                    loss = self.algorithm.loss(self.models, collator.batch(list(part or (0,))))
                sums.add(loss, counts=bool(part))
        return sums.reduced(self.accelerator, collator.divisor(units, per_token=self.algorithm.per_token))


def _schedule_state(schedule: Any) -> dict[str, Any]:
    whole = schedule.state_dict()
    return {key: whole[key] for key in ("last_epoch", "_step_count", "_last_lr")}
