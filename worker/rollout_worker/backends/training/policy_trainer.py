"""Training on samples of the policy itself: what reinforcement learning adds to the trainer.

A step is one batch of rollouts: P prompts, G samples of each, B = P x G rows. It has `num_iterations` passes over them,
of `num_minibatches` optimiser updates each, all with one learning rate. The exchange decides who generates and judges
the samples: the trainer gives its weights and gets rows.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.dataset import Dataset
from rollout.workloads.train.policy_config import GrpoSection, PolicySection
from rollout.workloads.train.prompts import Prompts
from rollout.workloads.train.sampler import order
from torch import Tensor

from rollout_worker.algorithms.advantages import group_advantages
from rollout_worker.algorithms.policy_port import PolicyAlgorithm, PolicyBatch, Update
from rollout_worker.algorithms.port import IGNORED, Loss, token_logps
from rollout_worker.backends.training.models import load_model
from rollout_worker.backends.training.sums import Sums
from rollout_worker.backends.training.trainer import Job, JudgeOf, Trainer
from rollout_worker.backends.training.versions import Versions

_MIX = 1_000_003


@dataclass(slots=True)
class Row:
    """A sample. `group` is its prompt in the step, `number` that of its row in the data. If `learnt` is empty, every
    token of `ids` is learnt. `rewards` are by name, None if not judged; `reward` is their weighted sum. `version` is
    that of the policy that generated it."""

    group: int
    number: int
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    reward: float = 0.0
    learnt: list[int] = field(default_factory=list[int])
    version: int = 0
    advantage: float = 0.0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def drawn(self) -> int:
        """Number of tokens that the policy generated, rather than an environment."""
        return sum(self.learnt) if self.learnt else len(self.ids)


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward model."""

    reward: JudgeOf
    model: Any


Fixed: TypeAlias = dict[str, Tensor]
"""Fields of `PolicyBatch` for one row, each (T - 1,)."""


class Exchange(Protocol):
    """Takes weights and returns samples. All ranks call it at once and get the same."""

    @property
    def versions(self) -> Versions:
        """Versions that rollouts may have."""
        ...

    def begin(self, directory: Path, versions: Mapping[int, Mapping[str, str]]) -> None:
        """Begin a segment, whose files are in `directory`. `versions` are those of `Versions.begin`."""
        ...

    def rollouts(self, step: int) -> list[Row]:
        """Return the rollouts of the step, counted from 0; the trainer's current weights are the version of this
        number."""
        ...

    def evaluation(self, step: int) -> list[Row]:
        """Return rollouts of the evaluation prompts by the weights after `step` steps."""
        ...


class PolicyTrainer(Trainer):
    """The trainer of GRPO and PPO. `job.data` and `job.eval_data` are files of prompts."""

    settings: PolicySection

    def __init__(self, job: Job, algorithm: PolicyAlgorithm, exchange: Callable[[PolicyTrainer], Exchange]) -> None:
        self.algorithm = algorithm
        super().__init__(job)
        self.exchange = exchange(self)
        self._judges = [Judge(one, self._load_judge(one.model)) for one in job.judges]
        self._rows: list[Row] = []

    def _load_judge(self, name: str) -> Any:
        model: Any = load_model(name, self.settings, "reward")
        return model.eval().requires_grad_(False).to(self.accelerator.device)

    def begin(self, directory: Path | None, versions: Mapping[int, Mapping[str, str]]) -> None:
        assert directory is not None
        self.exchange.begin(directory, versions)

    def told(self) -> JsonObject:
        """Return `scored`: what happened to the rewards of each row of the step."""
        scored = [{"rewards": row.rewards, "reward": row.reward, "advantage": row.advantage} for row in self._rows]
        return {"scored": scored}

    def _load_data(self, path: Path) -> Dataset:
        """Return prompts as sequences whose last token is learnt; the probe of the state uses them."""
        prompts = Prompts(path)
        found = [prompts[index] for index in range(len(prompts))]
        lengths = np.array([len(one.ids) for one in found], np.int64)
        count = len(found)
        learnt = np.ones(int(lengths.sum()), np.uint8)
        return Dataset(
            ids=np.concatenate([np.array(one.ids, np.int32) for one in found]),
            learnt=learnt,
            offsets=np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]),
            prompts=lengths.astype(np.int32),
            labels=np.zeros(count, np.uint8),
            margins=np.zeros(count, np.float32),
            numbers=np.array([one.number for one in found], np.int64),
            unit_offsets=np.arange(count + 1, dtype=np.int64),
            unit_rows=np.arange(count, dtype=np.int64),
        )

    # ---- a step

    def _step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        rows = self.exchange.rollouts(step)
        waited = time.perf_counter() - began
        self._judge(rows)
        found = rollout_metrics(rows, self._advantages(rows)) if rows else {}  # none: no reward could be had
        self._rows = rows
        lr = self.schedule.get_last_lr()[0]
        learnt, norms = self._updates(step, rows) if rows else ({}, [])
        with warnings.catch_warnings():  # torch warns of a rate that moves before the first update
            warnings.filterwarnings("ignore", ".*lr_scheduler.step", UserWarning)
            self.schedule.step()
        tokens = sum(row.length for row in rows)
        self.tokens += tokens
        return {
            "loss": learnt.pop("loss", 0.0), "lr": lr, "grad_norm": max(norms, default=0.0), "updates": len(norms),
            "tokens": tokens, "num_tokens": self.tokens, **found, **learnt,
            "seconds/rollouts": round(waited, 6), "seconds/training": round(time.perf_counter() - began - waited, 6),
        }  # fmt: skip

    def _judge(self, rows: Sequence[Row]) -> None:
        """Score the samples with the reward models."""
        for judge in self._judges:

            def score(part: Sequence[Row], model: Any = judge.model) -> Tensor:
                batch = self._batch(part)
                with torch.no_grad(), self.accelerator.autocast():
                    return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).float()[:, None]

            for row, found in zip(rows, self._measured(rows, score), strict=True):
                row.rewards[judge.reward.name] = float(found[0])
                row.reward += judge.reward.weight * float(found[0])

    def _advantages(self, rows: list[Row]) -> float:
        """Set the advantages of `rows`, and return the share of groups whose samples all have the same reward."""
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        width = max(len(group) for group in groups.values())
        table = torch.full((len(groups), width), math.nan, dtype=torch.float64)
        for place, group in enumerate(groups.values()):
            table[place, : len(group)] = torch.tensor([row.reward for row in group], dtype=torch.float64)
        scale = self.settings.scale_rewards if isinstance(self.settings, GrpoSection) else "none"
        advantages, silent = group_advantages(table, scale)
        for place, group in enumerate(groups.values()):
            for i, row in enumerate(group):
                row.advantage = float(advantages[place, i])
        return silent

    def _updates(self, step: int, rows: Sequence[Row]) -> tuple[dict[str, float], list[float]]:
        """Return (metrics, the gradient's norm of each update). An update without effect is skipped: the optimiser's
        state does not change."""
        norms, sums, divided = list[float](), Sums(), 0.0
        fixed = self._fixed(step, rows)
        for places in self._minibatches(step, len(rows)):
            update = self._size([rows[place] for place in places])
            if update.tokens and self._learns([rows[place] for place in places]):
                norms.append(self._update(step, rows, places, update, fixed, sums))
                divided += self.algorithm.divisor(update)
        return sums.reduced(self.accelerator, divided) if norms else {}, norms

    def _learns(self, rows: Sequence[Row]) -> bool:
        """Return whether an update with these rows could have an effect."""
        return self.settings.compared != "free" or any(row.advantage for row in rows)

    def _size(self, rows: Sequence[Row]) -> Update:
        learnt, size = [self._learnt(row) for row in rows], self.settings.minibatch_size
        microbatches = sum(any(learnt[first : first + size]) for first in range(0, len(rows), size))
        return Update(len(rows), sum(learnt), microbatches)

    def _update(
        self, step: int, rows: Sequence[Row], places: Sequence[int], update: Update, fixed: list[Fixed], sums: Sums
    ) -> float:
        divisor, own = self.algorithm.divisor(update), Sums()
        parts = self._shares(len(places), -(-len(places) // (self.settings.minibatch_size * self.world)))
        self.model.train()

        def learn(part: range) -> None:
            chosen = [places[place] for place in part or (0,)]
            loss = self._loss([rows[place] for place in chosen], [fixed[place] for place in chosen])
            self.accelerator.backward(loss.sum * (self.world / divisor if part else 0.0))
            for one in (own, sums):
                one.add(loss, counts=bool(part))

        norm = self._gradients(parts, learn)
        self._check(step, own.reduced(self.accelerator, divisor)["loss"], norm, self.units_of(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _loss(self, rows: Sequence[Row], fixed: Sequence[Fixed]) -> Loss:
        batch = self._batch(rows)
        for name in fixed[0]:
            setattr(batch, name, aligned([one[name] for one in fixed], batch.labels.shape[1] - 1))
        with self.accelerator.autocast():
            logits, values = self._outputs(batch)
            logits = logits / self.settings.temperature
            logps, mask = token_logps(logits, batch.labels)
            loss = self.algorithm.loss(logps, mask, batch, values)
        loss.metrics["entropy"] = entropy(logits, mask)
        return loss

    def _minibatches(self, step: int, rows: int) -> Iterator[list[int]]:
        """Yield the places of the rows of each update, in the order of generation if there is one update per pass."""
        settings = self.settings
        size = -(-rows // settings.num_minibatches)
        for iteration in range(settings.num_iterations):
            shuffled = settings.num_minibatches > 1
            places = order(rows, settings.seed ^ (step * _MIX), iteration).tolist() if shuffled else list(range(rows))
            for first in range(0, rows, size):
                yield places[first : first + size]

    # ---- batches

    def _learnt(self, row: Row) -> int:
        """Return the number of learnt tokens of a row."""
        if self.settings.mask_truncated_completions and row.finish_reason == "length":
            return 0
        return row.drawn

    def _batch(self, rows: Sequence[Row]) -> PolicyBatch:
        longest = max(row.length for row in rows)
        shape = (len(rows), longest)
        ids, mask = np.full(shape, self.job.pad, np.int64), np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        engine = np.zeros((len(rows), longest - 1), np.float32)
        for i, row in enumerate(rows):
            first, end = len(row.prompt), row.length
            ids[i, :end], mask[i, :end] = [*row.prompt, *row.ids], 1
            if self._learnt(row):
                learnt = np.array(row.learnt, bool) if row.learnt else np.ones(len(row.ids), bool)
                labels[i, first:end] = np.where(learnt, row.ids, IGNORED)
                engine[i, first - 1 : end - 1] = np.where(learnt, row.logprobs, 0.0)
        advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
        on = self.accelerator.device
        tensors: list[Tensor] = [_tensor(array).to(on) for array in (ids, mask, labels, engine)]
        numbers = tuple(row.number for row in rows)
        return PolicyBatch(
            tensors[0], tensors[1], tensors[2], numbers, advantages=advantages.to(on), engine_logps=tensors[3]
        )

    # ---- what stays the same through a step

    def _outputs(self, batch: PolicyBatch) -> tuple[Tensor, Tensor | None]:
        """Return logits, and values (B, T - 1) if there are any."""
        return self.models.policy(batch), None

    def _fixed(self, step: int, rows: Sequence[Row]) -> list[Fixed]:
        """Return the fixed fields of each row, before the first update; each rank has those of all rows."""
        found: list[Fixed] = [{} for _ in rows]
        self.model.eval()
        with torch.no_grad():
            if self._needs_old or rows[0].version != step:
                with self._as_drawn(step, rows[0].version):
                    self._measure(rows, found, "old_logps", self._old_logps)
            if self.settings.compared != "free":
                self._measure(rows, found, "reference_logps", self._reference_logps)
        return found

    def _as_drawn(self, step: int, version: int) -> AbstractContextManager[None]:
        """Switch to the policy that generated the samples of the step."""
        return nullcontext() if version == step else self.exchange.versions.standing(self.policy, version)

    def _measure(
        self, rows: Sequence[Row], found: list[Fixed], name: str, measured: Callable[[PolicyBatch], Tensor]
    ) -> None:
        for one, tensor in zip(found, self._measured(rows, lambda part: measured(self._batch(part))), strict=True):
            one[name] = tensor

    def _measured(self, rows: Sequence[Row], measured: Callable[[Sequence[Row]], Tensor]) -> list[Tensor]:
        """Return what `measured` computes for each row, in micro-batches: (rows, places). Each process does its
        share."""
        size = self.settings.minibatch_size
        parts = self._shares(len(rows), -(-len(rows) // (size * self.world)))
        own = [measured([rows[place] for place in part or (0,)]) for part in parts]
        if self.world == 1:
            return [one for table in own for one in table]
        width = max(row.length for row in rows)
        given: Any = self.accelerator
        shares: Tensor = given.gather(torch.stack([aligned(list(table), width, size) for table in own]))
        every = shares.view(self.world, len(parts), size, width).transpose(0, 1).reshape(-1, width)
        return list(every[: len(rows)])

    def _old_logps(self, batch: PolicyBatch) -> Tensor:
        with self.accelerator.autocast():
            return self._logps(self.models.policy(batch), batch)

    def _reference_logps(self, batch: PolicyBatch) -> Tensor:
        logits = self.models.reference(batch)
        assert logits is not None
        return self._logps(logits, batch)

    def _logps(self, logits: Tensor, batch: PolicyBatch) -> Tensor:
        return token_logps(logits / self.settings.temperature, batch.labels)[0]

    @property
    def _needs_old(self) -> bool:
        """Whether old log-probabilities are needed: not for a single update of the generating policy, whose ratio
        is 1."""
        return self.settings.updates > 1 or self.settings.importance_sampling_correction not in (None, "off")

    # ---- evaluation

    def evaluate(self) -> dict[str, float] | None:
        """Return the evaluation, in which `loss` is the negative reward, so that less is better as elsewhere; None if
        there are no prompts for it, or none has a reward."""
        if self.job.eval_data is None:
            return None
        rows = self.exchange.evaluation(self.step)
        if not rows:  # no reward could be had
            return None
        self._judge(rows)
        found = rollout_metrics(rows, 0.0)
        return {"loss": -found["reward"], **{k: v for k, v in found.items() if k.startswith(("reward", "completions"))}}


def entropy(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sum over learnt tokens of the policy's entropy in nats, number of tokens)."""
    with torch.no_grad():
        logs = logits[:, :-1].float().log_softmax(-1)
        each = -(logs.exp() * logs).sum(-1)
        return (each * mask).sum(), mask.sum()


def rollout_metrics(rows: Sequence[Row], silent: float) -> dict[str, float]:
    """Return the metrics of a step under TRL's names. `reward_std` is the mean over groups of their deviation."""
    rewards = np.array([row.reward for row in rows])
    lengths = np.array([row.drawn for row in rows])
    cut = np.array([row.finish_reason == "length" for row in rows])
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row.reward)
    spread = [float(np.std(group, ddof=1)) if len(group) > 1 else 0.0 for group in groups.values()]
    found = {
        "reward": float(rewards.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(cut.mean()),
    }
    if any(len(group) > 1 for group in groups.values()):
        found |= {"reward_std": float(np.mean(spread)), "frac_reward_zero_std": silent}
    for name in rows[0].rewards:
        values = [value for row in rows if (value := row.rewards.get(name)) is not None]
        if values:
            found[f"rewards/{name}/mean"] = float(np.mean(values))
            found[f"rewards/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return found


def rows_of(found: JsonObject) -> list[Row]:
    """Return the rows of a file from an exchange."""
    return [Row(**one) for one in found["rows"]]


def aligned(rows: Sequence[Tensor], width: int, count: int | None = None) -> Tensor:
    """Return (rows, width), truncated, or 0 after the end, where nothing is learnt. `count` is that of rows, if there
    are fewer."""
    found = rows[0].new_zeros((count or len(rows), width))
    for i, one in enumerate(rows):
        found[i, : min(width, len(one))] = one[:width]
    return found


def _tensor(array: Any) -> Tensor:
    library: Any = torch
    return library.from_numpy(array)
