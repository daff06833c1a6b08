"""Curves, snapshots and samples of a training run, for the live page and reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from rollout.workloads.commit import CommitEntry
from rollout.workloads.digest import Chart, Curve, Part, Samples, Sheet
from rollout.workloads.json_form import JsonObject
from rollout.workloads.train.segment import done

_CHARTS: dict[str, tuple[str, ...]] = {
    "Reward": ("reward",),
    "Loss": ("loss",),
    "Accuracy": ("mean_token_accuracy", "accuracy", "rewards/accuracies"),
    "KL from the reference": ("kl", "objective/kl"),
    "Reward margin": ("rewards/margins",),
    "Entropy": ("entropy",),
    "Completion length in tokens": ("completions/mean_length",),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("lr",),
    "Tokens a second": ("tokens_per_s",),
}
"""Metrics of a step that are drawn together, by title."""
_DRAWN = [name for names in _CHARTS.values() for name in names]
_EVALUATION = "Evaluation"
_LIVE = 500
_SHOWN = 50


class TrainDigest:
    """Collects the `Digest` of a training run."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._evaluations: dict[str, Curve] = {}
        self._step = 0
        self._live: deque[JsonObject] = deque(maxlen=_LIVE)
        self._snapshots: deque[tuple[int, str, int, float | None]] = deque(maxlen=_SHOWN)
        self._samples: deque[tuple[str, str]] = deque(maxlen=_SHOWN)

    def add(self, entry: CommitEntry) -> None:
        result = done(entry, "segment")
        if result is None:
            return
        self._step = result.step
        for line in result.metrics:
            _draw(self._curves, line, _DRAWN)
        for line in result.evaluations:
            _draw(self._evaluations, line, [name for name in line if name != "step"])
        loss = result.metrics[-1].get("loss") if result.metrics else None
        if result.snapshot:
            self._snapshots.appendleft((result.step, result.snapshot, result.size, loss))
        if result.samples:
            self._samples.appendleft((f"steps up to {result.step:,}", result.samples))

    def parts(self, figures: JsonObject) -> Sequence[Part]:
        parts: list[Part] = []
        running = self._running(figures)
        for title, names in _CHARTS.items():
            drawn = {name: self._curves[name].shown() for name in names if name in self._curves}
            live = {name: running[name].shown() for name in names if name in running}
            if drawn or live:
                parts.append(Chart(title, "step", drawn, live))
        if self._evaluations:
            parts.append(Chart(_EVALUATION, "step", {name: curve.shown() for name, curve in self._evaluations.items()}))
        if self._samples:
            parts.append(Samples("Samples", list(self._samples)))
        if self._snapshots:
            rows = [
                (f"{step:,}", "" if loss is None else f"{loss:.4f}", f"{size / (1 << 20):,.1f} MiB", snapshot[:16])
                for step, snapshot, size, loss in self._snapshots
            ]
            parts.append(
                Sheet("Snapshots", ("step", "loss", "size", "snapshot"), rows, f"The newest {_SHOWN} at most.")
            )
        return parts

    def _running(self, figures: JsonObject) -> dict[str, Curve]:
        """Return curves of the steps after the last result, as far as they were reported while someone watched."""
        if isinstance(step := figures.get("step"), int):
            while self._live and self._live[-1]["step"] >= step:  # another attempt, which began earlier
                self._live.pop()
            self._live.append(figures)
        while self._live and self._live[0]["step"] <= self._step:
            self._live.popleft()
        curves: dict[str, Curve] = {}
        for line in self._live:
            _draw(curves, line, _DRAWN)
        return curves


def _draw(curves: dict[str, Curve], line: JsonObject, names: Sequence[str]) -> None:
    step: Any = line.get("step")
    for name in names:
        value: Any = line.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            curves.setdefault(name, Curve()).add(step, value)
