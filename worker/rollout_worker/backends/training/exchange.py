"""The samples of a step: a rank gives its weights to the executor, which returns a file of samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.policy_config import PolicySection, PpoSection

from rollout_worker.algorithms.registered import make_policy_algorithm
from rollout_worker.backends.training.critic_trainer import CriticTrainer
from rollout_worker.backends.training.policy_trainer import PolicyTrainer, Row, rows_of
from rollout_worker.backends.training.publish import publish, published_tensors
from rollout_worker.backends.training.trainer import Job
from rollout_worker.backends.training.versions import Versions


class Asking(Protocol):
    def ask(self, **question: Any) -> dict[str, Any]:
        """Ask the executor, and return its reply."""
        ...


class RankExchange:
    """The `Exchange` of a worker's processes. Rank 0 writes the weights."""

    def __init__(self, rank: Asking, trainer: PolicyTrainer, dtype: torch.dtype) -> None:
        self._rank = rank
        self._trainer = trainer
        self._dtype = dtype
        self.versions = Versions(trainer.settings.lag, dtype)
        self._hashes: dict[str, str] = {}
        self._directory = Path()

    def begin(self, directory: Path, versions: Mapping[int, Mapping[str, str]]) -> None:
        """Begin a segment. Its first version is published in full, so that a restart of the segment publishes the
        same."""
        self._directory, self._hashes = directory, {}
        self.versions.begin(versions)

    def rollouts(self, step: int) -> list[Row]:
        return self._rows(step=step)

    def evaluation(self, step: int) -> list[Row]:
        return self._rows(step=step, evaluation=True)

    def _rows(self, **wants: Any) -> list[Row]:
        published = self._publish(wants["step"])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine may have the device meanwhile
        reply = self._rank.ask(wants={**wants, **published})
        found: JsonObject = json.loads(Path(reply["rollouts"]).read_text("utf-8"))
        return rows_of(found)

    def _publish(self, step: int) -> JsonObject:
        first = self._trainer.rank == 0
        tensors = published_tensors(self._trainer.policy, keep=first or self.versions.count > 0)
        self.versions.keep(step, tensors)
        if not first:
            return {}
        path = self._directory / f"weights-{step}.safetensors"
        published = publish(tensors, self._hashes, path, self._dtype)
        self._hashes = published.hashes
        return {"path": str(path), "hashes": published.hashes, "written": published.written}


def ask_for_rollouts(rank: Asking, job: Job, settings: PolicySection, dtype: str) -> PolicyTrainer:
    """Return a trainer whose samples come from the executor of `rank`. `dtype` is that of published weights."""
    kind: torch.dtype = getattr(torch, dtype)
    made = CriticTrainer if isinstance(settings, PpoSection) else PolicyTrainer
    return made(job, make_policy_algorithm(settings), lambda trainer: RankExchange(rank, trainer, kind))
