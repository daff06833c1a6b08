"""Progress of a training run within a segment: only shown; what is kept comes with the result."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import Any

from rollout.workloads.json_form import JsonObject

STEPS_MAX = 50
"""Number of steps in a rate, including evaluations and snapshots between them, because the end depends on them."""
SPAN_MAX = 20.0  # times the median
_SHOWN = ("loss", "lr", "grad_norm", "mfu", "reward", "kl", "entropy", "completions/mean_length")

_SAID = (
    ("reward", "reward", ".3f"), ("loss", "loss", ".4f"), ("lr", "lr", ".3g"), ("grad_norm", "grad norm", ".3g"),
    ("kl", "KL", ".3g"), ("entropy", "entropy", ".3g"),
)  # fmt: skip


class Pace:
    """Rate of steps: call `begin` when steps begin and `add` after each. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=STEPS_MAX + 1)
        self._tokens = 0

    def begin(self, now: float) -> None:
        """Begin a sequence of steps. What came before, such as loading a model, is in no rate."""
        self._points.clear()
        self._points.append((now, self._tokens))

    def add(self, tokens: int, now: float) -> None:
        self._tokens += tokens
        self._points.append((now, self._tokens))

    @property
    def step_s(self) -> float | None:
        """Seconds per step, or None if not known yet."""
        steps, seconds = len(self._points) - 1, self._seconds
        return seconds / steps if steps > 0 and seconds > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        seconds = self._seconds
        return (self._points[-1][1] - self._points[0][1]) / seconds if seconds > 0 else None

    @property
    def _seconds(self) -> float:
        """Seconds of all steps, with a limit for rare long ones: a step that waited for space says nothing of the
        next."""
        times = [at for at, _ in self._points]
        spans = [after - before for before, after in pairwise(times)]
        longest = SPAN_MAX * median(spans) if spans else 0.0
        return sum(min(span, longest) for span in spans)


def figures(metrics: JsonObject, steps: int, pace: Pace) -> dict[str, Any]:
    """Return the figures for programs. `steps` is the number of the whole run. Unknown or infinite numbers are null."""
    step = int(metrics["step"])
    found: dict[str, Any] = {"step": step, "steps": steps}
    found |= {name: _finite(metrics[name]) for name in _SHOWN if name in metrics}
    step_s, tokens_per_s = pace.step_s, pace.tokens_per_s
    found["tokens_per_s"] = round(tokens_per_s, 1) if tokens_per_s is not None else None
    found["eta_s"] = round((steps - step) * step_s, 1) if step_s is not None else None
    return found


def evaluation_figures(stopping: JsonObject) -> dict[str, Any]:
    """Return the last evaluation and the best so far; empty if there was none."""
    if not stopping:
        return {}
    last, best = stopping["last_evaluation"], stopping["best_evaluation"]
    return {
        "eval_step": last["step"], "eval_loss": _finite(last["loss"]),
        "best_eval_step": best["step"], "best_eval_loss": _finite(best["loss"]),
    }  # fmt: skip


def line(shown: dict[str, Any]) -> str:
    """Return the figures as text for people."""
    parts = [f"step {shown['step']}/{shown['steps']}"]
    for name, label, form in _SAID:
        if shown.get(name) is not None:
            parts.append(f"{label} {shown[name]:{form}}")
    if shown.get("eval_loss") is not None:
        what, sign = ("reward", -1) if "reward" in shown else ("loss", 1)  # a policy's is its reward's opposite
        best = f"{sign * shown['best_eval_loss']:.4f} at step {shown['best_eval_step']}"
        parts.append(f"eval {what} {sign * shown['eval_loss']:.4f} (best {best})")
    if shown.get("tokens_per_s") is not None:
        parts.append(f"{shown['tokens_per_s']:,.0f} tokens/s")
    if shown.get("mfu") is not None:
        parts.append(f"MFU {shown['mfu']:.0%}")
    if shown.get("eta_s") and shown["step"] < shown["steps"]:
        parts.append(f"ETA {_span(shown['eta_s'])}")
    return " · ".join(parts)


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
