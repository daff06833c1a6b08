"""The result of an experiment: its variants, each compared with the baseline, and reasons not to trust it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollout.model.errors import InputError
from rollout.workloads.experiment.analysis.bootstrap import cluster_bootstrap
from rollout.workloads.experiment.analysis.corrections import benjamini_hochberg, holm
from rollout.workloads.experiment.analysis.database import Database
from rollout.workloads.experiment.analysis.effects import cohens_h, unpaired_difference
from rollout.workloads.experiment.analysis.sources import Pair, Source
from rollout.workloads.experiment.analysis.verdict import Interval, Verdict, non_inferior, verdict
from rollout.workloads.experiment.analysis.view_sets import ViewSet
from rollout.workloads.experiment.contracts import PASS_RATE, PASS_RATE_NAMES, SCORE, Direction, RunManifest
from rollout.workloads.job.averages import mean
from rollout.workloads.job.compare import compare
from rollout.workloads.job.intervals import Estimate, estimate
from rollout.workloads.job.pass_at_k import PassAtK, pass_at_each_k
from rollout.workloads.json_form import JsonObject

LISTED_MAX = 50
"""Maximum number of flaky tasks and of failure clusters to list."""
_UNSCORED_SHARE = 0.1
"""A variant with a larger share of unscored trials gets a note."""
WELCH = "welch_clustered"
Groups = dict[str, list[float]]
"""Values by task."""


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Counts of trials: `scored` ones passed or did not; `infrastructure` ones failed through no fault of the agent and
    are not scored. Costs and tokens are those of trials that reported them, null if none did."""

    variant_id: str
    baseline: bool
    trials: int
    scored: int
    completed: int
    failed: int
    infrastructure: int
    pruned: int
    cancelled: int
    tasks: int
    pass_rate: Estimate | None
    mean_score: Estimate | None
    pass_at_k: tuple[PassAtK, ...]
    cost_usd: float | None
    mean_cost_usd: float | None
    tokens_in: int | None
    tokens_out: int | None
    mean_duration_ms: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant compared with the baseline in one measure. `difference` is the variant's mean minus the baseline's, in
    paired designs over the `tasks` scored in both, each counted once; `low` and `high` are its 95 % interval.

    `p_holm` and `p_bh` are corrected for all variants compared in this measure. `cohens_h` is that of pass rates.
    `bootstrap` is the interval of the cluster bootstrap, for comparison. In designs with one trial per task,
    `discordant` counts tasks that only the baseline, and only the variant, passed. `only_a` and `only_b` count tasks
    scored in one only.
    """

    measure: str
    direction: Direction
    baseline_id: str
    variant_id: str
    tasks: int
    only_a: int
    only_b: int
    baseline_mean: float
    variant_mean: float
    difference: float
    low: float | None
    high: float | None
    test: str
    p_value: float | None
    p_exact: float | None
    discordant: tuple[int, int] | None
    cohens_h: float | None
    bootstrap: Interval | None
    p_holm: float | None = None
    p_bh: float | None = None
    verdict: Verdict = "inconclusive"
    non_inferior: bool | None = None

    @property
    def interval(self) -> Interval | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True, slots=True)
class CostRatio:
    """The mean cost of a trial of the variant divided by the baseline's, over tasks where both are known, and its 95 %
    interval by the cluster bootstrap."""

    baseline_id: str
    variant_id: str
    tasks: int
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class FlakyTask:
    task_id: str
    variant_id: str
    scored: int
    passes: int


@dataclass(frozen=True, slots=True)
class FailureCluster:
    classification: str
    pattern: str
    trials: int
    tasks: int
    scored: int
    variants: tuple[str, ...]
    example: str
    example_trial: str


@dataclass(frozen=True, slots=True)
class MetricMean:
    metric: str
    source: str
    variant_id: str
    trials: int
    mean: float


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A compared run. If two runs are compared, `label` and a slash precede each of its variants."""

    label: str
    run_id: str
    name: str
    created_at: str
    directory: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result. `primary` is the measure of the verdict. `ungraded` are variants whose grader never worked, which are
    not compared. `flaky_tasks` and `failure_clusters` count everything; `flaky` and `failures` list the first."""

    experiment_id: str
    runs: tuple[str, ...]
    compared: tuple[ComparedRun, ...]
    view_set: ViewSet
    primary: str
    margin: float | None
    committed: int
    total_slots: int
    variants: tuple[VariantResult, ...]
    ungraded: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    costs: tuple[CostRatio, ...]
    metrics: tuple[MetricMean, ...]
    flaky_tasks: int
    flaky: tuple[FlakyTask, ...]
    failure_clusters: int
    failures: tuple[FailureCluster, ...]
    notes: tuple[str, ...]

    @property
    def verdicts(self) -> list[Comparison]:
        """Comparisons in the primary measure."""
        return [one for one in self.comparisons if one.measure == self.primary]


@dataclass(frozen=True, slots=True)
class _Measure:
    name: str
    direction: Direction
    values: dict[str, Groups]
    """By variant."""


def analyze(
    database: Database,
    sources: Sequence[Source],
    pairs: Sequence[Pair],
    margin: float | None = None,
) -> Analysis:
    """Analyze the runs `sources`, the first of which defines the measures. `margin` is that of equivalence and
    non-inferiority, in the unit of the measure; None takes the manifest's."""
    first = sources[0].manifest
    margin = first.thresholds.non_inferiority_margin if margin is None else margin
    measures, primary, notes = _measures(database, first)
    ungraded = [name for (name,) in database.rows(_UNGRADED)]
    notes += [f"{name}: no verdict: the grader left no usable grade in any of its trials" for name in ungraded]
    judged = [pair for pair in pairs if not set(pair).intersection(ungraded)]
    paired = database.view_set in (ViewSet.AB_TEST, ViewSet.MULTI_VARIANT)
    comparisons: list[Comparison] = []
    for measure in measures:
        found: list[Comparison] = []
        for pair in judged:
            try:
                found.append(_compare(measure, pair, paired=paired))
            except InputError:
                notes.append(f"{measure.name}: {pair[1]} is not compared with {pair[0]}: no task was scored in both")
        comparisons += _judged(found, margin if measure.name == primary else None)
    variants = _variants(database, measures, pairs, [name for one in sources for name in one.variants])
    notes += [
        f"{one.variant_id}: {one.trials - one.scored:,} of {one.trials:,} trials are not scored: the rest may be of "
        "easier or harder tasks"
        for one in variants
        if one.trials - one.scored > _UNSCORED_SHARE * one.trials
    ]
    progress = database.rows("SELECT sum(committed)::BIGINT, sum(total_slots)::BIGINT FROM run_progress")[0]
    flaky = database.rows("SELECT task_id, variant_id, scored, passes FROM task_flakiness")
    failures = database.rows("FROM failure_clusters")
    return Analysis(
        experiment_id=first.experiment_id,
        runs=tuple(one.manifest.run_id for one in sources),
        compared=tuple(map(_compared, sources)) if len(sources) > 1 else (),
        view_set=database.view_set,
        primary=primary,
        margin=margin,
        committed=progress[0] or 0,
        total_slots=progress[1] or 0,
        variants=tuple(variants),
        ungraded=tuple(ungraded),
        comparisons=tuple(comparisons),
        costs=tuple(ratio for pair in pairs if (ratio := _cost(database, pair))),
        metrics=tuple(MetricMean(*row) for row in database.rows(_METRICS)),
        flaky_tasks=len(flaky),
        flaky=tuple(FlakyTask(*row) for row in flaky[:LISTED_MAX]),
        failure_clusters=len(failures),
        failures=tuple(
            FailureCluster(*row[:5], variants=tuple(row[5]), example=row[6] or "", example_trial=row[7])
            for row in failures[:LISTED_MAX]
        ),
        notes=(*database.notes, *notes),
    )


def _compared(source: Source) -> ComparedRun:
    manifest = source.manifest
    return ComparedRun(source.label, manifest.run_id, manifest.name, manifest.created_at, str(source.directory))


_COUNTED = (
    "variant_id", "baseline", "trials", "scored", "completed", "failed", "infrastructure", "pruned", "cancelled",
    "tasks", "cost_usd", "mean_cost_usd", "tokens_in", "tokens_out", "mean_duration_ms",
)  # fmt: skip
_UNGRADED = """
SELECT variant_id FROM trials t JOIN facts_runs r ON r.run_id = t.run_id
WHERE r.graded GROUP BY variant_id
HAVING bool_or(coalesce(starts_with(classification, 'verifier_'), false))
    AND bool_and(coalesce(starts_with(classification, 'verifier_'), false) OR value IS NULL)
ORDER BY min(schedule_index)
"""
_METRICS = """
SELECT metric_name, source, variant_id, count(*), avg(metric_value) FROM metrics_long
WHERE source <> 'grade' OR metric_name <> 'score'  -- which is among the variants, of all trials that are scored
GROUP BY ALL ORDER BY metric_name, source, min(schedule_index)
"""


def _measures(database: Database, manifest: RunManifest) -> tuple[list[_Measure], str, list[str]]:
    """Return the measures, the name of the primary one, and notes."""
    wanted = manifest.primary_metric
    is_primary, direction = database.rows("SELECT is_primary, direction FROM score_direction")[0]
    measures = [_Measure(PASS_RATE, "maximize", _groups(database, "pass"))]
    if database.rows("SELECT count(*) FROM trials WHERE value NOT IN (0, 1) OR value IS DISTINCT FROM pass")[0][0]:
        measures.append(_Measure(SCORE, "minimize" if direction < 0 else "maximize", _groups(database, "value")))
    if wanted.name in PASS_RATE_NAMES:
        return measures, PASS_RATE, []
    if is_primary:
        return measures, measures[-1].name, []
    found = _groups(database, "metric_value", "metrics_long", f"metric_name = {_quoted(wanted.name)}")
    if not found:
        return measures, PASS_RATE, [f'no trial has the primary metric "{wanted.name}": the pass rate stands for it']
    return [*measures, _Measure(wanted.name, wanted.direction, found)], wanted.name, []


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _groups(database: Database, column: str, view: str = "trials", condition: str = "true") -> dict[str, Groups]:
    found: dict[str, Groups] = {}
    rows = database.rows(
        f"SELECT variant_id, task_id, list({column} ORDER BY schedule_index, row_sequence) FROM {view} "
        f"WHERE {column} IS NOT NULL AND {condition} GROUP BY variant_id, task_id ORDER BY min(schedule_index)"
    )
    for variant, task, values in rows:
        found.setdefault(variant, {})[task] = values
    return found


def _variants(
    database: Database, measures: Sequence[_Measure], pairs: Sequence[Pair], order: Sequence[str]
) -> list[VariantResult]:
    passes, scores = measures[0].values, _groups(database, "value")
    found: list[VariantResult] = []
    for row in database.rows(f"SELECT {', '.join(_COUNTED)} FROM variant_summary"):
        counted: dict[str, Any] = dict(zip(_COUNTED, row, strict=True))
        variant: str = counted["variant_id"]
        passed: dict[Hashable, list[float]] = {**passes.get(variant, {})}
        scored = estimate({**scores.get(variant, {})})
        counted["baseline"] = any(variant == baseline for baseline, _ in pairs) if pairs else counted["baseline"]
        ks = tuple(pass_at_each_k(passed))
        found.append(VariantResult(**counted, pass_rate=estimate(passed), mean_score=scored, pass_at_k=ks))
    places = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda one: places.get(one.variant_id, len(places)))


def _compare(measure: _Measure, pair: Pair, *, paired: bool) -> Comparison:
    """Compare a pair. Raises InputError if no task was scored in both, or, in unpaired designs, no trial of one."""
    a, b = (measure.values.get(name, {}) for name in pair)
    if not paired:
        return _unpaired(measure, pair, a, b)
    found = compare(pair[0], {("", task): a[task] for task in a}, pair[1], {("", task): b[task] for task in b})
    rates = measure.name == PASS_RATE
    means = [(mean(a[task]), mean(b[task])) for task in a if task in b]
    differences = [other - one for one, other in means]
    return Comparison(
        measure=measure.name,
        direction=measure.direction,
        baseline_id=pair[0],
        variant_id=pair[1],
        tasks=found.tasks,
        only_a=found.only_a,
        only_b=found.only_b,
        baseline_mean=found.mean_a,
        variant_mean=found.mean_b,
        difference=found.difference,
        low=found.low,
        high=found.high,
        test=found.test,
        p_value=found.p_value,
        p_exact=found.p_exact,
        discordant=found.discordant,
        cohens_h=cohens_h(found.mean_a, found.mean_b) if rates else None,
        bootstrap=cluster_bootstrap([(one, 1.0) for one in differences], lambda totals: totals[0] / totals[1]),
    )


def _unpaired(measure: _Measure, pair: Pair, a: Groups, b: Groups) -> Comparison:
    if not a or not b:
        raise InputError(f"no trial of {pair[1] if a else pair[0]} was scored")
    found = unpaired_difference({**a}, {**b})
    means = [mean([value for values in groups.values() for value in values]) for groups in (a, b)]
    return Comparison(
        measure=measure.name,
        direction=measure.direction,
        baseline_id=pair[0],
        variant_id=pair[1],
        tasks=len(a.keys() & b.keys()),
        only_a=len(a.keys() - b.keys()),
        only_b=len(b.keys() - a.keys()),
        baseline_mean=means[0],
        variant_mean=means[1],
        difference=found.value,
        low=found.low,
        high=found.high,
        test=WELCH,
        p_value=found.p_value,
        p_exact=None,
        discordant=None,
        cohens_h=cohens_h(means[0], means[1]) if measure.name == PASS_RATE else None,
        bootstrap=None,
    )


def _judged(found: Sequence[Comparison], margin: float | None) -> list[Comparison]:
    """Correct the p-values for all of `found`, and add verdicts."""
    known = [one.p_value for one in found if one.p_value is not None]
    by_holm, by_bh = iter(holm(known)), iter(benjamini_hochberg(known))
    judged: list[Comparison] = []
    for one in found:
        corrected = None if one.p_value is None else next(by_holm)
        says = verdict(one.difference, one.interval, corrected, margin=margin, direction=one.direction)
        judged.append(
            replace(
                one,
                p_holm=corrected,
                p_bh=None if one.p_value is None else next(by_bh),
                verdict=says,
                non_inferior=non_inferior(one.interval, margin, one.direction),
            )
        )
    return judged


_COSTS = """
WITH costs AS (
    SELECT variant_id, task_id, sum(cost_usd) AS total, count(*) AS n FROM trials
    WHERE cost_usd IS NOT NULL GROUP BY ALL
)
SELECT a.total, a.n, b.total, b.n FROM costs a JOIN costs b USING (task_id)
WHERE a.variant_id = ? AND b.variant_id = ? ORDER BY task_id
"""


def _cost(database: Database, pair: Pair) -> CostRatio | None:
    """Return the cost ratio, or None if no task has known costs of both or the baseline's are 0."""
    rows = database.rows(_COSTS, pair)

    def ratio(totals: Sequence[float]) -> float:
        cost_a, n_a, cost_b, n_b = totals
        return (cost_b / n_b) / (cost_a / n_a) if cost_a else math.nan

    if not rows or not sum(row[0] for row in rows):
        return None
    low, high = cluster_bootstrap(rows, ratio) or (None, None)
    return CostRatio(*pair, len(rows), ratio([math.fsum(column) for column in zip(*rows, strict=True)]), low, high)


def analysis_json(found: Analysis) -> JsonObject:
    """Return the object of `rollout experiment analyze --json`."""
    return asdict(found)
