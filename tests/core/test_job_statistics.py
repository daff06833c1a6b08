"""The statistics of jobs against scipy and statsmodels, or by hand where these have none; and their coverage."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Hashable
from itertools import product
from typing import Any

import pytest
from rollout.workloads.job.compare import (
    EXACT_MAX,
    Comparison,
    bonett_price,
    compare,
    mcnemar,
    sign_flip,
)
from rollout.workloads.job.intervals import Estimate, clustered_error, estimate
from rollout.workloads.job.pass_at_k import pass_at_each_k, pass_at_k
from rollout.workloads.job.student import t_cdf, t_quantile

stats: Any = pytest.importorskip("scipy.stats")
Groups = dict[Hashable, list[float]]


@pytest.fixture(scope="module")
def sm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, at import
        return pytest.importorskip("statsmodels.api")


def groups_of(tasks: int, attempts: Callable[[], int], draw: Callable[[random.Random], float], seed: int) -> Groups:
    """Rewards of tasks that differ in how hard they are: 0 or 1 with a chance that `draw` gives each task."""
    generator = random.Random(seed)
    found: Groups = {}
    for task in range(tasks):
        chance = draw(generator)
        found[task] = [float(generator.random() < chance) for _ in range(attempts())]
    return found


# ---- Student's t


@pytest.mark.parametrize("df", [1, 2, 5, 30, 99, 5000])
def test_students_t_is_that_of_scipy(df: int) -> None:
    for t in (-50, -2.1, -0.3, 0, 0.01, 1.96, 8, 1e3):
        assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), abs=1e-11)
    for p in (0.001, 0.025, 0.5, 0.9, 0.975, 0.99999):
        assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(("p", "df"), [(0, 5), (1, 5), (0.5, 0)])
def test_a_quantile_that_there_is_not(p: float, df: float) -> None:
    with pytest.raises(ValueError, match="p must lie between 0 and 1"):
        t_quantile(p, df)


# ---- intervals


def test_the_clustered_error_is_that_of_statsmodels(sm: Any) -> None:
    generator = random.Random(3)
    groups: Groups = {task: [generator.gauss(task % 5, 1) for _ in range(1 + task % 4)] for task in range(30)}
    values = [value for rewards in groups.values() for value in rewards]
    labels = [task for task, rewards in groups.items() for _ in rewards]
    fit = sm.OLS(values, [1.0] * len(values)).fit(cov_type="cluster", cov_kwds={"groups": labels}, use_t=True)
    found = estimate(groups)
    assert found is not None
    assert found.standard_error == pytest.approx(fit.bse[0], rel=1e-9)
    low, high = fit.conf_int()[0]
    assert (found.low, found.high) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))
    assert (found.trials, found.tasks) == (len(values), 30)


def test_with_one_attempt_a_task_it_is_the_usual_t_interval() -> None:
    values = [0.2, 0.5, 0.9, 0.4, 0.7]
    found = estimate({task: [value] for task, value in enumerate(values)})
    assert found is not None
    low, high = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_for_0_and_1_of_many_tasks_it_is_wilsons(sm: Any) -> None:
    from statsmodels.stats.proportion import proportion_confint

    groups: Groups = {task: [float(task % 5 == 0)] for task in range(20_000)}
    found = estimate(groups)
    assert found is not None
    low, high = proportion_confint(4000, 20_000, method="wilson")  # z in place of t, n in place of n - 1
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-5), pytest.approx(high, abs=2e-5))


def test_attempts_that_agree_say_no_more_than_one() -> None:
    once: Groups = {task: [float(task < 12)] for task in range(20)}
    ten: Groups = {task: rewards * 10 for task, rewards in once.items()}
    one, many = estimate(once), estimate(ten)
    assert one is not None
    assert many is not None
    assert many.standard_error == pytest.approx(one.standard_error)
    assert (many.low, many.high) == (pytest.approx(one.low), pytest.approx(one.high))


def test_all_that_pass_are_not_certain_to_pass() -> None:
    """Wilson's lower bound of n of n: n / (n + t²), by hand, with t of 9 degrees of freedom."""
    found = estimate({task: [1.0, 1.0] for task in range(10)})
    assert found is not None
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(10 / (10 + 2.2621571628**2))


def wilson(rate: float, count: float, t: float) -> tuple[float, float]:
    """By its formula: the rates p with (rate - p)² = t² p (1 - p) / count."""
    a, b, c = 1 + t * t / count, 2 * rate + t * t / count, rate * rate
    root = (b * b - 4 * a * c) ** 0.5
    return (b - root) / (2 * a), (b + root) / (2 * a)


@pytest.mark.parametrize(
    ("groups", "rate", "count"),
    [
        ({**{task: [1.0, 0.0] for task in range(9)}, 9: [1.0, 1.0]}, 0.55, 20),  # attempts differ more than by chance
        ({task: [float(task < 6)] * 3 for task in range(10)}, 0.6, 10),  # attempts that all agree
    ],
)
def test_trials_count_as_at_most_what_they_are_and_at_least_as_their_tasks(
    groups: Groups, rate: float, count: float
) -> None:
    found = estimate(groups)
    assert found is not None
    assert found.mean == pytest.approx(rate)
    low, high = wilson(rate, count, stats.t.ppf(0.975, 9))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_the_interval_of_a_rate_stays_between_0_and_1() -> None:
    found = estimate({task: [float(task == 0)] for task in range(5)})
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < 0.2 < found.high < 1


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, None),
        ({"t": []}, None),
        ({"t": [1.0, 0.0]}, Estimate(0.5, None, None, None, 2, 1)),
        ({"t": [0.5], "u": [0.5]}, Estimate(0.5, None, None, None, 2, 2)),
        ({"t": [1e308], "u": [-1e308]}, Estimate(0.0, None, None, None, 2, 2)),
    ],
)
def test_what_says_nothing_has_no_interval(groups: Groups, expected: Estimate | None) -> None:
    assert estimate(groups) == expected


@pytest.mark.slow
@pytest.mark.parametrize("attempts", [4, 0])  # 0: one to eight, by chance
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (0.5, 0.5)])
def test_the_coverage_of_the_interval_of_rates_more_often(shape: tuple[float, float], attempts: int) -> None:
    assert 0.94 <= _coverage_of_rates(50, attempts, shape, 4000) <= 0.96


def test_the_coverage_of_the_interval_of_rates() -> None:
    assert 0.94 <= _coverage_of_rates(50, 4, (2, 2), 1500) <= 0.96


def _coverage_of_rates(tasks: int, attempts: int, shape: tuple[float, float], times: int) -> float:
    covered = 0
    generator = random.Random(7)
    for _ in range(times):
        groups: Groups = {}
        for task in range(tasks):
            chance = generator.betavariate(*shape)
            count = attempts or generator.choice((1, 2, 4, 8))
            groups[task] = [float(generator.random() < chance) for _ in range(count)]
        found = estimate(groups)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= shape[0] / sum(shape) <= found.high
    return covered / times


@pytest.mark.parametrize("tasks", [50, 100, 200])
def test_the_coverage_with_one_attempt_a_task_is_right_on_average_over_rates(tasks: int) -> None:
    """Computed, not simulated. At a single rate it swings, as of any interval of so few possible outcomes."""
    intervals = [estimate({task: [float(task < passed)] for task in range(tasks)}) for passed in range(tasks + 1)]
    rates = [0.1 + 0.8 * step / 80 for step in range(81)]
    coverage = [
        sum(
            probability
            for one, probability in zip(intervals, stats.binom.pmf(range(tasks + 1), tasks, rate), strict=True)
            if one is not None and one.low is not None and one.high is not None and one.low <= rate <= one.high
        )
        for rate in rates
    ]
    assert 0.94 <= sum(coverage) / len(coverage) <= 0.96
    assert min(coverage) > 0.92


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 0.5], [0.0, 0.0, 0.5]])
def test_the_interval_of_rewards_within_0_and_1_stays_there(rewards: list[float]) -> None:
    found = estimate({task: [reward] for task, reward in enumerate(rewards)})
    assert found is not None and found.low is not None and found.high is not None
    assert 0 <= found.low < found.mean < found.high <= 1


def test_the_coverage_of_the_interval_of_other_rewards() -> None:
    times, covered, naive = 1500, 0, 0
    generator = random.Random(11)
    for _ in range(times):
        centres = [generator.gauss(0.3, 1) for _ in range(30)]
        groups: Groups = {task: [generator.gauss(centre, 0.5) for _ in range(3)] for task, centre in enumerate(centres)}
        found = estimate(groups)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.3 <= found.high
        values = [value for rewards in groups.values() for value in rewards]
        error = clustered_error([[value] for value in values], found.mean)
        naive += abs(found.mean - 0.3) <= 1.99 * error
    assert 0.94 <= covered / times <= 0.96
    assert naive / times < 0.85  # what clustering is for: attempts taken for independent


# ---- pass@k


def by_hand(tries: int, passed: int, k: int) -> float:
    """Of all ways to choose k of the tries, those with one that passed."""
    from itertools import combinations

    chosen = list(combinations(range(tries), k))
    return sum(any(one < passed for one in choice) for choice in chosen) / len(chosen)


@pytest.mark.parametrize(("tries", "passed"), [(1, 0), (1, 1), (5, 2), (7, 0), (7, 7), (8, 1)])
def test_pass_at_k_is_what_counting_gives(tries: int, passed: int) -> None:
    for k in range(1, tries + 1):
        assert pass_at_k(tries, passed, k) == pytest.approx(by_hand(tries, passed, k), abs=1e-15)


def test_pass_at_k_of_a_large_number_of_tries() -> None:
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)
    assert pass_at_k(10_000, 1, 10_000) == 1.0


@pytest.mark.parametrize(("tries", "passed", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1), (3, -1, 1)])
def test_pass_at_k_without_an_unbiased_estimate(tries: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="there is no pass@"):
        pass_at_k(tries, passed, k)


def test_each_k_says_over_how_many_tasks_it_is() -> None:
    found = pass_at_each_k({"t": [1.0, 0.0, 0.9], "u": [0.0, 2.0], "v": []})
    assert [(one.k, one.value.tasks, one.value.mean) for one in found] == [
        (1, 2, pytest.approx((1 / 3 + 1 / 2) / 2)),
        (2, 2, pytest.approx((2 / 3 + 1) / 2)),
        (3, 1, 1.0),
    ]


def test_of_large_k_the_powers_of_two_are_enough() -> None:
    found = [one.k for one in pass_at_each_k({"t": [1.0] * 600})]
    assert found == [*range(1, 101), 128, 256, 512]


# ---- comparisons


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (3, 9), (10, 10), (0, 6), (25, 40), (200, 160)])
def test_mcnemars_exact_test_is_that_of_statsmodels(sm: Any, b: int, c: int) -> None:
    from statsmodels.stats import contingency_tables

    tables: Any = contingency_tables
    exact, mid = mcnemar(b, c)
    assert exact == pytest.approx(tables.mcnemar([[3, b], [c, 5]], exact=True).pvalue)
    assert mid == pytest.approx(exact - (stats.binom.pmf(b, b + c, 0.5) * (0.5 if b == c else 1) if b + c else 0))


def test_the_mid_p_value_of_a_published_table() -> None:
    """Fagerland et al. 2013, table 1: 1 and 7 discordant pairs, exact 0.0703 and mid-p 0.0391."""
    exact, mid = mcnemar(1, 7)
    assert (round(exact, 4), round(mid, 4)) == (0.0703, 0.0391)


def test_the_interval_of_bonett_and_price_by_hand() -> None:
    """(1 + 1)/(21 + 2) and (7 + 1)/(21 + 2): difference 6/23, variance (10/23 - 36/529)/23."""
    low, high = bonett_price(1, 7, 21)
    half = 1.959964 * ((10 / 23 - 36 / 529) / 23) ** 0.5
    assert (low, high) == (pytest.approx(6 / 23 - half, abs=1e-6), pytest.approx(6 / 23 + half, abs=1e-6))
    assert bonett_price(0, 0, 20)[0] < 0 < bonett_price(0, 0, 20)[1]


def test_the_coverage_of_the_interval_of_a_difference() -> None:
    times, covered, generator = 3000, 0, random.Random(5)
    for _ in range(times):
        drawn = [generator.random() for _ in range(60)]
        only_a, only_b = sum(one < 0.1 for one in drawn), sum(0.1 <= one < 0.3 for one in drawn)
        low, high = bonett_price(only_a, only_b, 60)
        covered += low <= 0.1 <= high
    assert 0.94 <= covered / times <= 0.965  # a little wide by design


def test_the_sign_flip_test_is_that_of_scipy() -> None:
    differences = [0.3, -0.1, 0.25, 0.0, 0.4, 0.15, -0.05, 0.2]
    p, exact = sign_flip(differences)
    theirs: Any = stats.permutation_test(
        (differences,), lambda x, axis: x.sum(axis=axis), permutation_type="samples", n_resamples=float("inf")
    )
    assert exact
    assert p == pytest.approx(theirs.pvalue)


def test_the_sign_flip_test_by_counting() -> None:
    assert sign_flip([1.0, 2.0, 3.0]) == (2 / 8, True)
    assert sign_flip([0.0, 0.0]) == (1.0, True)
    assert sign_flip([1e308, 1e308]) == (0.5, True)


@pytest.mark.parametrize("tenths", [[-9, 8, 7, 1, 8], [-7, -1, -8, 9], [4, 5, -6, -6, 4, 2, -4]])
def test_sums_that_differ_by_rounding_alone_are_ties(tenths: list[int]) -> None:
    assert sign_flip([one / 10 for one in tenths]) == sign_flip([float(one) for one in tenths])


def test_the_sampled_sign_flip_test_comes_near_the_exact_one_and_repeats() -> None:
    generator = random.Random(2)
    differences = [generator.gauss(0.3, 1) for _ in range(EXACT_MAX + 2)]
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=16)]
    exact = sum(one >= abs(sum(differences)) - 1e-12 for one in sums) / len(sums)
    p, was_exact = sign_flip(differences)
    assert not was_exact
    assert p == pytest.approx(exact, abs=0.01)
    assert sign_flip(differences) == (p, False)


def test_no_p_value_is_0() -> None:
    assert sign_flip([1.0] * 40)[0] == 1 / 20_001


def test_one_attempt_of_0_and_1_is_compared_by_mcnemar() -> None:
    a = {("d", f"t{n}"): [float(n < 10)] for n in range(21)}
    b = {("d", f"t{n}"): [float(n < 9 or 10 <= n < 17)] for n in range(21)}
    found = compare("x", a, "y", b)
    assert (found.test, found.tasks, found.discordant) == ("mcnemar_mid_p", 21, (1, 7))
    assert (round(found.p_value, 4), found.difference) == (0.0391, pytest.approx(6 / 21))
    assert (found.low, found.high) == bonett_price(1, 7, 21)
    assert [flip.task for flip in found.gained] == [f"t{n}" for n in range(10, 17)]
    assert [(flip.task, flip.a_pass_rate, flip.b_pass_rate) for flip in found.lost] == [("t9", 1.0, 0.0)]


def test_other_rewards_are_compared_by_signs_and_a_t_interval() -> None:
    a = {("d", "t"): [0.5, 0.7], ("d", "u"): [0.1], ("d", "v"): [0.3], ("d", "gone"): [1.0]}
    b = {("d", "t"): [0.9], ("d", "u"): [0.2, 0.6], ("d", "v"): [0.4], ("d", "new"): [1.0], ("d", "failed"): []}
    found = compare("x", a, "y", b)
    differences = [0.3, 0.3, 0.1]
    theirs = stats.ttest_rel([0.9, 0.4, 0.4], [0.6, 0.1, 0.3]).confidence_interval()
    assert (found.tasks, found.only_a, found.only_b, found.test) == (3, 1, 1, "sign_flip_exact")
    assert found.difference == pytest.approx(sum(differences) / 3)
    assert (found.low, found.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert found.p_value == 2 / 8


@pytest.mark.parametrize("attempts", [1, 2])
def test_the_other_way_round_is_the_same_with_the_other_sign(attempts: int) -> None:
    a = {("d", f"t{n}"): [float(n == 0)] * attempts for n in range(3)}
    b = {("d", f"t{n}"): [1.0] * attempts for n in range(3)}
    one, other = compare("x", a, "y", b), compare("y", b, "x", a)
    assert one.low is not None and one.high is not None and other.low is not None and other.high is not None
    assert (one.difference, one.low, one.high) == pytest.approx((-other.difference, -other.high, -other.low))
    assert one.p_value == other.p_value
    assert -1 <= one.low < one.difference < one.high <= 1


def alike(score_a: float, score_b: float, tasks: int, attempts: int = 2) -> Comparison:
    keys = [("d", f"t{n}") for n in range(tasks)]
    return compare("x", {key: [score_a] * attempts for key in keys}, "y", {key: [score_b] * attempts for key in keys})


@pytest.mark.parametrize(("score_a", "score_b"), [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
def test_attempts_that_all_agree_count_as_one(score_a: float, score_b: float) -> None:
    assert alike(score_a, score_b, 9, attempts=3) == alike(score_a, score_b, 9, attempts=1)


@pytest.mark.usefixtures("sm")
def test_tasks_that_all_differ_alike_have_newcombes_interval() -> None:
    theirs: Any = pytest.importorskip("statsmodels.stats.proportion")
    for score_a, score_b, tasks in ((0.5, 0.5, 4000), (0.2, 0.4, 4000), (0.5, 0.5, 50)):
        found = alike(score_a, score_b, tasks)
        counts = (round(score_b * tasks), tasks, round(score_a * tasks), tasks)
        low, high = theirs.confint_proportions_2indep(*counts, compare="diff", method="newcomb")
        assert found.difference == pytest.approx(score_b - score_a)
        # Theirs has the normal quantile in the place of Student's.
        assert (found.low, found.high) == pytest.approx((low, high), rel=0.05 if tasks < 100 else 1e-3)


def test_the_interval_of_tasks_that_all_differ_alike_stays_within_what_is_possible_and_narrows() -> None:
    widths: list[float] = []
    for tasks in (2, 10, 100, 1000):
        found = alike(0.9, 1.0, tasks)
        assert found.low is not None and found.high is not None
        assert -1 <= found.low < 0.1 < found.high <= 1
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True) and widths[-1] < 0.05


@pytest.mark.parametrize(("score", "tasks"), [(7.0, 3), (0.5, 1)])
def test_where_nothing_says_how_much_scores_vary_there_is_no_interval(score: float, tasks: int) -> None:
    found = alike(score, score, tasks)
    assert (found.difference, found.low, found.high) == (0.0, None, None)


def test_several_attempts_of_0_and_1_are_not_compared_as_if_they_were_one() -> None:
    a = {("d", f"t{n}"): [1.0, 0.0] for n in range(6)}
    b = {("d", f"t{n}"): [1.0, 1.0] for n in range(6)}
    found = compare("x", a, "y", b)
    assert (found.test, found.p_exact, found.difference) == ("sign_flip_exact", None, 0.5)
    assert len(found.gained) == 6  # half of the attempts are not most of them
