"""The statistics of experiments against scipy and statsmodels, and on simulated data whose truth is known."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from rollout.workloads.experiment.analysis.bootstrap import GROUPS_MAX, cluster_bootstrap
from rollout.workloads.experiment.analysis.corrections import benjamini_hochberg, holm
from rollout.workloads.experiment.analysis.effects import cohens_h, unpaired_difference
from rollout.workloads.experiment.analysis.verdict import non_inferior, verdict
from rollout.workloads.job.compare import compare

stats: Any = pytest.importorskip("scipy.stats")
Groups = dict[Hashable, list[float]]


@pytest.fixture(scope="module")
def sm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, at import
        return pytest.importorskip("statsmodels.api")


def mean_of(totals: Sequence[float]) -> float:
    return totals[0] / totals[1]


# ---- effects


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (0.2, 0.7), (0.0, 1.0), (0.93, 0.9)])
def test_cohens_h_is_that_of_statsmodels(sm: Any, a: float, b: float) -> None:
    assert cohens_h(a, b) == pytest.approx(sm.stats.proportion_effectsize(b, a), abs=1e-12)


def test_cohens_h_of_what_is_no_rate() -> None:
    with pytest.raises(ValueError, match="within"):
        cohens_h(0.5, 1.1)


def test_the_unpaired_difference_with_one_trial_a_task_is_welchs_test() -> None:
    generator = random.Random(5)
    a = [generator.gauss(1, 1) for _ in range(12)]
    b = [generator.gauss(1.5, 2) for _ in range(30)]
    groups: list[Groups] = [{index: [one] for index, one in enumerate(values)} for values in (a, b)]
    found = unpaired_difference(groups[0], groups[1])
    expected = stats.ttest_ind(b, a, equal_var=False)
    interval = expected.confidence_interval()
    assert found.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_the_unpaired_difference_without_variation_has_newcombes_interval_and_the_exact_permutation_test() -> None:
    def alike(value: float, clusters: int) -> Groups:
        return {n: [value] * 3 for n in range(clusters)}

    found = unpaired_difference(alike(1.0, 8), alike(0.0, 5))
    assert found.low is not None and found.high is not None
    assert (found.value, found.low) == (-1.0, -1.0) and found.high < 0
    assert found.p_value == pytest.approx(2 * stats.fisher_exact([[8, 0], [0, 5]]).pvalue)
    found = unpaired_difference(alike(0.5, 200), alike(0.5, 200))
    assert found.low is not None and -0.12 < found.low < 0 and found.p_value == 1.0
    found = unpaired_difference(alike(7.0, 4), alike(7.0, 4))  # it may vary by anything
    assert (found.low, found.high, found.p_value) == (None, None, 1.0)
    with pytest.raises(ValueError, match="no mean"):
        unpaired_difference({}, {1: [1.0]})


@pytest.mark.parametrize("unequal", [False, True])
def test_the_paired_interval_is_the_cluster_robust_one_of_statsmodels(sm: Any, unequal: bool) -> None:
    """Of the differences of replications, each task with the same weight however often it was tried."""
    generator = random.Random(11)
    a: dict[tuple[str, str], list[float]] = {}
    b: dict[tuple[str, str], list[float]] = {}
    for task in range(25):
        tries = 1 + task % 3 if unequal else 3
        level = generator.gauss(0, 2)
        a[("", str(task))] = [level + generator.gauss(0, 1) for _ in range(tries)]
        b[("", str(task))] = [level + 0.4 + generator.gauss(0, 1) for _ in range(tries)]
    pairs = [(task, other - one, 1 / len(a[task])) for task in a for one, other in zip(a[task], b[task], strict=True)]
    labels = [int(task[1]) for task, _, _ in pairs]
    model = sm.WLS([one for _, one, _ in pairs], [1.0] * len(pairs), weights=[weight for _, _, weight in pairs])
    fit = model.fit(
        cov_type="cluster", cov_kwds={"groups": labels, "use_correction": False, "df_correction": True}, use_t=True
    )
    found = compare("a", a, "b", b)
    assert found.low is not None and found.high is not None
    assert found.difference == pytest.approx(fit.params[0])
    # statsmodels without its correction, which counts single trials, has G where we have G - 1.
    half = stats.t.ppf(0.975, 24) * fit.bse[0] * math.sqrt(25 / 24)
    assert (found.low, found.high) == (
        pytest.approx(found.difference - half, rel=1e-9),
        pytest.approx(found.difference + half, rel=1e-9),
    )


# ---- corrections


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_corrected_p_values_are_those_of_statsmodels(sm: Any, count: int) -> None:
    generator = random.Random(count)
    p_values = [generator.choice([0.0, 0.01, 0.04, 1.0, generator.random()]) for _ in range(count)]
    for ours, name in ((holm, "holm"), (benjamini_hochberg, "fdr_bh")):
        assert ours(p_values) == pytest.approx(list(sm.stats.multipletests(p_values, method=name)[1]), abs=1e-12)


def test_no_p_value_is_corrected_to_none() -> None:
    assert holm([]) == benjamini_hochberg([]) == []


# ---- the bootstrap


def test_the_bootstrap_comes_near_that_of_scipy_and_repeats() -> None:
    generator = random.Random(2)
    values = [generator.expovariate(1) for _ in range(60)]
    clusters = [(one, 1.0) for one in values]
    found = cluster_bootstrap(clusters, mean_of)
    expected = stats.bootstrap(
        (values,), lambda x, axis: x.mean(axis=axis), n_resamples=5000, method="percentile", rng=1
    ).confidence_interval
    assert found is not None
    assert found == (pytest.approx(expected.low, abs=0.03), pytest.approx(expected.high, abs=0.03))
    assert cluster_bootstrap(clusters, mean_of) == found


def test_many_clusters_are_drawn_in_groups_with_the_same_width() -> None:
    generator = random.Random(3)
    values = [generator.gauss(0, 1) for _ in range(10 * GROUPS_MAX)]
    low, high = cluster_bootstrap([(one, 1.0) for one in values], mean_of, draws=600) or (0.0, 0.0)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(len(values)), rel=0.1)


def test_the_bootstrap_of_what_has_no_interval() -> None:
    assert cluster_bootstrap([], mean_of) is None
    assert cluster_bootstrap([(1.0, 1.0)], mean_of) is None
    assert cluster_bootstrap([(1.0, 0.0), (0.0, 1.0)], lambda totals: math.nan) is None


# ---- the verdict


@pytest.mark.parametrize(
    ("difference", "interval", "p", "margin", "direction", "expected"),
    [
        (0.1, (0.02, 0.18), 0.01, None, "maximize", "better"),
        (-0.1, (-0.18, -0.02), 0.01, None, "maximize", "worse"),
        (-0.1, (-0.18, -0.02), 0.01, None, "minimize", "better"),
        (0.1, (0.02, 0.18), 0.06, None, "maximize", "inconclusive"),  # corrected for other variants
        (0.1, (-0.01, 0.21), 0.04, None, "maximize", "inconclusive"),
        (0.01, (-0.01, 0.03), 0.4, 0.05, "maximize", "tied"),
        (0.02, (0.01, 0.03), 0.001, 0.05, "maximize", "tied"),  # sure, and too small to matter
        (0.01, (-0.06, 0.08), 0.8, 0.05, "maximize", "inconclusive"),
        (1.0, None, 0.001, 0.05, "maximize", "better"),  # all tasks differ alike
        (0.0, None, 1.0, 0.05, "maximize", "inconclusive"),
        (0.1, None, None, None, "maximize", "inconclusive"),
    ],
)
def test_the_verdict(difference: float, interval: Any, p: Any, margin: Any, direction: Any, expected: str) -> None:
    assert verdict(difference, interval, p, margin=margin, direction=direction) == expected


@pytest.mark.parametrize(
    ("interval", "margin", "direction", "expected"),
    [
        ((-0.04, 0.1), 0.05, "maximize", True),
        ((-0.05, 0.1), 0.05, "maximize", False),
        ((-0.1, 0.04), 0.05, "minimize", True),
        ((-0.1, 0.06), 0.05, "minimize", False),
        (None, 0.05, "maximize", None),
        ((-0.04, 0.1), None, "maximize", None),
    ],
)
def test_non_inferiority(interval: Any, margin: Any, direction: Any, expected: Any) -> None:
    assert non_inferior(interval, margin, direction) is expected


# ---- simulations


def drawn(generator: random.Random, tasks: int, replications: int) -> tuple[Groups, Groups]:
    """Trials of two variants that are equally good: a task's rate is its own with each variant, and the same on
    average, so that the trials of one task are alike."""
    a: Groups = {}
    b: Groups = {}
    for task in range(tasks):
        for groups in (a, b):
            chance = generator.betavariate(0.8, 0.8)
            groups[task] = [float(generator.random() < chance) for _ in range(replications)]
    return a, b


def test_clustered_data_are_called_different_at_the_stated_rate_and_by_the_naive_bootstrap_far_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.workloads.job.compare.DRAWS", 400)
    generator = random.Random(20)
    rounds, paired, flipped, unpaired, naive = 400, 0, 0, 0, 0
    for _ in range(rounds):
        a, b = drawn(generator, 30, 8)
        keyed = [{("", str(task)): values for task, values in groups.items()} for groups in (a, b)]
        found = compare("a", keyed[0], "b", keyed[1])
        assert found.low is not None and found.high is not None
        paired += not found.low <= 0 <= found.high
        flipped += found.p_value <= 0.05
        p_value = unpaired_difference(a, b).p_value
        unpaired += p_value is not None and p_value <= 0.05
        trials = [(other - one, 1.0) for task in a for one, other in zip(a[task], b[task], strict=True)]
        low, high = cluster_bootstrap(trials, mean_of, draws=100, seed=generator.getrandbits(30)) or (0.0, 0.0)
        naive += not low <= 0 <= high
    # Two standard errors of a rate of 0.05 in 400 rounds are 0.022.
    assert 0.028 <= paired / rounds <= 0.072
    assert 0.028 <= flipped / rounds <= 0.072
    assert 0.028 <= unpaired / rounds <= 0.072
    assert naive / rounds > 0.3


def test_the_coverage_of_the_paired_interval_when_there_is_a_difference() -> None:
    """94 to 96 %: 2,500 rounds have a standard error of 0.4 %."""
    generator = random.Random(8)
    rounds, covered = 2500, 0
    for _ in range(rounds):
        a: dict[tuple[str, str], list[float]] = {}
        b: dict[tuple[str, str], list[float]] = {}
        for task in range(40):
            base = generator.betavariate(2, 2) * 0.8
            a[("", str(task))] = [float(generator.random() < base) for _ in range(3)]
            b[("", str(task))] = [float(generator.random() < base + 0.2 * generator.random()) for _ in range(3)]
        one, other = ([sum(values) / 3 for values in groups.values()] for groups in (a, b))
        found = t_interval([y - x for x, y in zip(one, other, strict=True)])
        covered += found[0] <= 0.1 <= found[1]
    assert 0.94 <= covered / rounds <= 0.96


def t_interval(differences: list[float]) -> tuple[float, float]:
    """What `compare` gives, without its test, which takes most of its time."""
    from rollout.workloads.job.intervals import estimate

    found = estimate({index: [one] for index, one in enumerate(differences)}, differences=True)
    assert found is not None and found.low is not None and found.high is not None
    return found.low, found.high
