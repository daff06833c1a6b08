"""Wording of comparisons for the terminal and the report."""

from __future__ import annotations

from rollout.workloads.experiment.analysis.summary import WELCH, ComparedRun, Comparison, CostRatio
from rollout.workloads.experiment.analysis.verdict import Interval
from rollout.workloads.experiment.contracts import PASS_RATE

TESTS = {
    "mcnemar_mid_p": "McNemar's mid-p test",
    "sign_flip_exact": "exact sign-flip test",
    "sign_flip_sampled": "sampled sign-flip test",
    WELCH: "Welch's t test, clustered by task",
}


def legend(one: ComparedRun) -> str:
    """Format a run, as `A: runs/x, run 01K9..., 2026-11-01 00:00`."""
    return f"{one.label}: {one.directory}, run {one.run_id}, {one.created_at[:16].replace('T', ' ')} UTC"


def measure(name: str) -> str:
    return "pass rate" if name == PASS_RATE else name


def change(value: float, interval: Interval | None, *, rates: bool) -> str:
    """Format a change, as `+5.2 points [+1.0, +9.4]` for rates and `+0.052 [+0.01, +0.094]` otherwise."""
    if rates:
        text = f"{value * 100:+.1f} points"
        return text if interval is None else f"{text} [{interval[0] * 100:+.1f}, {interval[1] * 100:+.1f}]"
    text = f"{value:+.4g}"
    return text if interval is None else f"{text} [{interval[0]:+.4g}, {interval[1]:+.4g}]"


def p_text(value: float | None) -> str:
    """Format a p-value, as `0.034` or `< 0.001`; a dash if there is no test."""
    return "-" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def cost_ratio(found: CostRatio) -> str:
    """Format a ratio with its interval, as `0.71 [0.65, 0.78]`."""
    interval = "" if found.low is None or found.high is None else f" [{found.low:.3g}, {found.high:.3g}]"
    return f"{found.ratio:.3g}{interval}"


def tokens(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def says(one: Comparison, margin: float | None) -> str:
    """Return the verdict as a sentence."""
    rates = one.measure == PASS_RATE
    what = f"{one.variant_id} is {one.verdict}" if one.verdict in ("better", "worse") else one.variant_id
    p = p_text(one.p_holm)
    p = p if p.startswith("<") else f"= {p}"
    detail = f"{measure(one.measure)} {change(one.difference, one.interval, rates=rates)}, p {p}"
    if one.verdict in ("better", "worse"):
        return f"{what} than {one.baseline_id}: {detail}"
    if one.verdict == "tied":
        return f"{what} and {one.baseline_id} are tied, within a margin of {margin:g}: {detail}"
    hint = "" if margin is not None else "; name the margin within which you call them tied with --margin"
    if one.interval is None:
        hint = "; there is no interval: fewer than two tasks, or differences that do not vary"
    return f"{what} and {one.baseline_id}: inconclusive: {detail}{hint}"
