"""The schedule, the digest of what was resolved, and the sizes of experiments."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from experiments import TASKS, resolved
from hypothesis import given
from hypothesis import strategies as st
from rollout.workloads.experiment.contracts import ScheduleOrder, Slot
from rollout.workloads.experiment.power import detectable, tasks_for
from rollout.workloads.experiment.resolve import config_of, digest_of, positions
from rollout.workloads.experiment.schedule import schedule, trial_id

SIZES = st.tuples(*[st.integers(1, 4)] * 3)


def triples(order: ScheduleOrder, sizes: tuple[int, int, int], seed: int = 0) -> list[tuple[int, int, int]]:
    return [(slot.variant_idx, slot.task_idx, slot.repl_idx) for slot in schedule(order, *sizes, seed)]


@given(SIZES)
def test_variant_sequential_goes_by_variant_task_replication(sizes: tuple[int, int, int]) -> None:
    assert triples("variant_sequential", sizes) == list(product(*map(range, sizes)))


@given(SIZES)
def test_paired_interleaved_goes_by_task_variant_replication(sizes: tuple[int, int, int]) -> None:
    found = triples("paired_interleaved", sizes)
    assert found == sorted(found, key=lambda slot: (slot[1], slot[0], slot[2]))
    assert Counter(found) == Counter(product(*map(range, sizes)))


@given(SIZES, st.integers(0, 99))
def test_randomized_is_a_permutation_that_its_seed_decides(sizes: tuple[int, int, int], seed: int) -> None:
    assert triples("randomized", sizes, seed) == triples("randomized", sizes, seed)
    assert Counter(triples("randomized", sizes, seed)) == Counter(product(*map(range, sizes)))


def test_a_randomized_schedule_stays_the_same_from_version_to_version() -> None:
    assert triples("randomized", (2, 2, 2), 7)[:3] == [(0, 1, 1), (0, 1, 0), (1, 1, 0)]
    assert triples("randomized", (2, 2, 2), 8) != triples("randomized", (2, 2, 2), 7)


def test_trials_are_numbered_from_one() -> None:
    assert (trial_id(0), trial_id(1_234_566)) == ("trial_000001", "trial_1234567")


def test_the_digest_is_of_content_and_not_of_how_it_was_written() -> None:
    one = resolved(design={"replications": 2, "seed": 1})
    assert one.digest == resolved(design={"seed": 1, "replications": 2, "order": "paired_interleaved"}).digest
    assert one.digest == digest_of(one.json)
    assert one.digest != resolved(design={"replications": 2, "seed": 2}).digest
    assert one.digest == resolved(design={"replications": 2, "seed": 1}, workers={"count": 3}, runs_dir="x").digest


def test_what_was_resolved_gives_the_experiment_again() -> None:
    one = resolved(grading={"command": "grade"})
    assert config_of(one.json) == one.config


def test_each_slot_of_the_schedule_is_a_contract() -> None:
    slots = resolved(design={"replications": 2}).slots
    assert len(slots) == 2 * 2 * len(TASKS) and all(isinstance(slot, Slot) for slot in slots)


def test_positions_count_the_trials_of_each_chain() -> None:
    assert positions(["a", "b", "a", None, "a", "b"]) == [0, 0, 1, 0, 2, 1]


# Connor (1987), with a discordance of one half: (1.959964 sqrt(0.5) + 0.841621 sqrt(0.5 - d^2))^2 / d^2, rounded up.
@pytest.mark.parametrize(("effect", "tasks"), [(0.1, 391), (0.2, 96), (0.3, 42)])
def test_the_size_of_a_paired_experiment_is_connors(effect: float, tasks: int) -> None:
    assert tasks_for(effect, paired=True) == tasks


def test_the_size_of_an_unpaired_experiment_is_that_of_statsmodels() -> None:
    from statsmodels.stats.proportion import samplesize_proportions_2indep_onetail

    expected = samplesize_proportions_2indep_onetail(0.1, 0.45, 0.8, alpha=0.05)
    assert abs(tasks_for(0.1, paired=False) - expected) <= 1


@given(st.integers(5, 5000), st.booleans(), st.integers(1, 10))
def test_the_smallest_effect_that_is_found_is_the_one_that_the_size_is_for(
    tasks: int, paired: bool, replications: int
) -> None:
    effect = detectable(tasks, paired=paired, replications=replications)
    assert effect == 1.0 or tasks_for(effect, paired=paired, replications=replications) <= tasks
    if effect > 0.01:
        assert tasks_for(effect - 0.005, paired=paired, replications=replications) >= tasks


def test_replications_of_a_task_help_less_than_other_tasks() -> None:
    assert detectable(200, paired=True) < detectable(100, paired=True, replications=2) < detectable(100, paired=True)


@pytest.mark.parametrize("effect", [0, -0.1, 1.1])
def test_an_effect_is_a_difference_of_rates(effect: float) -> None:
    with pytest.raises(ValueError):
        tasks_for(effect, paired=True)
