"""Prints the result of an experiment as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from rollout.cli.show import console, print_table, table
from rollout.cli.words import counted, first_line
from rollout.config.visible import visible
from rollout.workloads.experiment.analysis.summary import Analysis, Comparison
from rollout.workloads.experiment.analysis.wording import TESTS, change, cost_ratio, legend, p_text, says, tokens
from rollout.workloads.experiment.analysis.wording import measure as named
from rollout.workloads.experiment.contracts import PASS_RATE
from rollout.workloads.job.overview import dollars, number, percent, seconds, shown_ks

FLAKY_SHOWN = 10
FAILURES_SHOWN = 10


def print_analysis(found: Analysis) -> None:
    say = console().print
    say(f"{visible(found.experiment_id)}: {found.committed:,} of {found.total_slots:,} trials committed")
    for one in found.compared:
        say(f"  {visible(legend(one))}")
    for note in found.notes:
        say(f"warning: {visible(note)}")
    say()
    for one in found.verdicts:
        say(visible(says(one, found.margin)))
    if found.verdicts:
        say()
    _print_variants(found)
    for measure in dict.fromkeys(one.measure for one in found.comparisons):
        say()
        _print_comparisons(measure, [one for one in found.comparisons if one.measure == measure], found)
    if found.costs:
        say()
        costs = table("variant", "baseline", "cost ratio [95 %]", "tasks")
        for one in found.costs:
            costs.add_row(visible(one.variant_id), visible(one.baseline_id), cost_ratio(one), f"{one.tasks:,}")
        print_table(costs, "")
    _print_pass_at_k(found)
    _print_metrics(found)
    _print_failures(found)


def _print_variants(found: Analysis) -> None:
    shown = table(
        "variant", "n", "scored", "failed", "infra", "pruned", "pass rate [95 %]", "mean score", "cost", "tokens in",
        "out", "mean time",
    )  # fmt: skip
    for one in found.variants:
        shown.add_row(
            visible(one.variant_id) + (" (baseline)" if one.baseline else ""),
            f"{one.trials:,}", f"{one.scored:,}", f"{one.failed:,}", f"{one.infrastructure:,}", f"{one.pruned:,}",
            percent(one.pass_rate), number(one.mean_score), dollars(one.cost_usd or 0.0), tokens(one.tokens_in),
            tokens(one.tokens_out), seconds(None if one.mean_duration_ms is None else one.mean_duration_ms / 1000),
        )  # fmt: skip
    print_table(shown, "no trial is committed yet")


def _print_comparisons(measure: str, comparisons: Sequence[Comparison], found: Analysis) -> None:
    rates = measure == PASS_RATE
    more = ("h",) if rates else ()
    margins = ("non-inferior",) if measure == found.primary and found.margin is not None else ()
    corrected = ("p (Holm)", "p (BH)") if len(comparisons) > 1 else ()
    shown = table(named(measure), "baseline", "tasks", "difference [95 %]", "p", *corrected, *more, "verdict", *margins)
    for one in comparisons:
        shown.add_row(
            visible(one.variant_id),
            visible(one.baseline_id),
            f"{one.tasks:,}",
            change(one.difference, one.interval, rates=rates),
            p_text(one.p_value),
            *((p_text(one.p_holm), p_text(one.p_bh)) if corrected else ()),
            *((f"{one.cohens_h:+.2f}",) if rates and one.cohens_h is not None else ("",) * len(more)),
            one.verdict,
            *(({True: "yes", False: "no", None: "-"}[one.non_inferior],) if margins else ()),
        )
    print_table(shown, "")
    used = ", ".join(dict.fromkeys(TESTS[one.test] for one in comparisons))
    console().print(f"  p: {used}; differences are the variant's less the baseline's")
    for one in comparisons:
        if one.only_a or one.only_b:
            console().print(
                f"  {visible(one.variant_id)}: {counted(one.only_a + one.only_b, 'task')} scored in one of both alone"
            )


def _print_pass_at_k(found: Analysis) -> None:
    ks = sorted({each.k for one in found.variants for each in shown_ks(one.pass_at_k)})
    if not ks:
        return
    console().print()
    shown = table("variant", *(f"pass@{k}" for k in ks))
    for one in found.variants:
        values = {each.k: percent(each.value) for each in one.pass_at_k}
        shown.add_row(visible(one.variant_id), *(values.get(k, "-") for k in ks))
    print_table(shown, "")


def _print_metrics(found: Analysis) -> None:
    if not found.metrics:
        return
    console().print()
    shown = table("metric", "source", *(visible(one.variant_id) for one in found.variants))
    for metric, source in dict.fromkeys((one.metric, one.source) for one in found.metrics):
        means = {one.variant_id: one.mean for one in found.metrics if (one.metric, one.source) == (metric, source)}
        values = (f"{means[one.variant_id]:.4g}" if one.variant_id in means else "-" for one in found.variants)
        shown.add_row(visible(metric), source or "", *values)
    print_table(shown, "")


def _print_failures(found: Analysis) -> None:
    if found.failures:
        console().print()
        shown = table("failure", "trials", "tasks", "variants", "message", "such as")
        for one in found.failures[:FAILURES_SHOWN]:
            shown.add_row(
                one.classification, f"{one.trials:,}", f"{one.tasks:,}", visible(", ".join(one.variants)),
                first_line(one.pattern), visible(one.example_trial),
            )  # fmt: skip
        print_table(shown, "")
        _more(found.failure_clusters - FAILURES_SHOWN, "failure_clusters")
    if found.flaky:
        console().print()
        shown = table("flaky task", "variant", "passed")
        for one in found.flaky[:FLAKY_SHOWN]:
            shown.add_row(visible(one.task_id), visible(one.variant_id), f"{one.passes:,} of {one.scored:,}")
        print_table(shown, "")
        _more(found.flaky_tasks - FLAKY_SHOWN, "task_flakiness")


def _more(number: int, view: str) -> None:
    if number > 0:
        console().print(f"  and {number:,} more: the view {view} has them")


def print_rows(columns: Iterable[str], rows: Iterable[Sequence[Any]], limit: int) -> None:
    """Print the first `limit` rows, and say if there are more."""
    shown: Table = table(*map(visible, columns))
    for place, row in enumerate(rows):
        if place == limit:
            print_table(shown, "")
            console().print(f"the first {limit:,} rows: --format csv or json has all of them")
            return
        shown.add_row(*("" if value is None else visible(_cell(value)) for value in row))
    print_table(shown, "no rows")


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
