"""Makes batches of tests, in the order in which they should start. Pure and deterministic.

Long batches start first (longest processing time), and batch sizes fall towards the end (guided self-scheduling:
Polychronopoulos and Kuck, 1987), so that all slots finish at about the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollout.workloads.test.cases import Batch, Case

IDS_MAX = 30_000
"""Maximum characters of a batch's ids, each with a separator, so that they fit into a command line."""

_DIVISOR = 4
"""A batch takes the remaining work, divided by the slots and by this: sizes reach single units when 4 per slot are
left."""

_SHORT = 64
"""Units shorter than this part of a slot's share stay in the order of discovery: neighbours share files and imports."""

_SECONDS_MIN = 0.001
"""Minimum expected duration of a test, because dispatching it takes time too."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a group. With `individual`, each test is a batch. With `split_scopes`, a scope longer than a slot's fair
    share is split."""

    individual: bool = False
    split_scopes: bool = False
    retries: int = 0
    limit_s: float = 0.0


_NO_RULES = Rules()


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tests that stay in one batch."""

    ids: tuple[str, ...]
    seconds: float

    @property
    def characters(self) -> int:
        return sum(len(one) + 1 for one in self.ids)


def schedule(
    cases: Sequence[Case],
    expected_s: Callable[[Case], float],
    slots: int,
    rules: Mapping[str, Rules] = {},
) -> list[Batch]:
    """Return the batches. `expected_s` estimates the duration of a try. `rules` are by group. A case that is listed
    several times gets as many batches."""
    seconds = [max(expected_s(case), _SECONDS_MIN) for case in cases]
    remaining, slots = sum(seconds), max(slots, 1)
    fair = remaining / slots
    queues = {
        key: deque(sorted(units, key=lambda unit: -_length(unit, fair)))
        for key, units in _units(cases, seconds, rules, fair).items()
    }
    batches = list[Batch]()
    while queues:
        key = max(queues, key=lambda key: _length(queues[key][0], fair))  # of equal ones the first
        queue, rule = queues[key], rules.get(key[0], _NO_RULES)
        taken = _take(queue, 0.0 if rule.individual else remaining / slots / _DIVISOR)
        if not queue:
            del queues[key]
        length = sum(unit.seconds for unit in taken)
        remaining -= length
        batches.append(
            Batch(
                group=key[0],
                ids=tuple(one for unit in taken for one in unit.ids),
                retries=rule.retries,
                limit_s=rule.limit_s,
                expected_ms=round(length * 1000),
            )
        )
    return batches


def end_sessions(batches: Sequence[Batch], cases: Sequence[Case]) -> list[Batch]:
    """End each session fixture exactly once, with the last batch that uses it."""
    uses = {(case.group, case.id): case.session for case in cases}
    unseen = {(case.group, name) for case in cases for name in case.session}
    marked = list(batches)
    for at in reversed(range(len(marked))):
        batch = marked[at]
        if seen := unseen & {(batch.group, name) for id in batch.ids for name in uses[batch.group, id]}:
            unseen -= seen
            marked[at] = batch.model_copy(update={"ends_session": True})
    return marked


def _length(unit: _Unit, fair: float) -> float:
    return unit.seconds if unit.seconds > fair / _SHORT else 0.0


def _take(queue: deque[_Unit], share: float) -> list[_Unit]:
    """Take at least one unit, then as many as fit."""
    taken = [queue.popleft()]
    seconds, characters = taken[0].seconds, taken[0].characters
    while queue and (seconds := seconds + queue[0].seconds) <= share:
        if (characters := characters + queue[0].characters) > IDS_MAX:
            break
        taken.append(queue.popleft())
    return taken


def _units(
    cases: Sequence[Case], seconds: Sequence[float], rules: Mapping[str, Rules], fair: float
) -> dict[tuple[str, int], list[_Unit]]:
    """Return units by group and instance, in the order of discovery. A batch never mixes them."""
    instances = Counter[tuple[str, str]]()
    members: dict[tuple[str, int], dict[tuple[str, str], list[tuple[str, float]]]] = {}
    for case, length in zip(cases, seconds, strict=True):
        instance = instances[case.group, case.id]
        instances[case.group, case.id] += 1
        whole = bool(case.scope) and not rules.get(case.group, _NO_RULES).individual
        unit = (case.scope, "") if whole else ("", case.id)
        members.setdefault((case.group, instance), {}).setdefault(unit, []).append((case.id, length))
    return {
        key: [unit for tests in units.values() for unit in _pieces(tests, rules.get(key[0], _NO_RULES), fair)]
        for key, units in members.items()
    }


def _pieces(tests: Sequence[tuple[str, float]], rule: Rules, fair: float) -> Iterable[_Unit]:
    """Return one unit, or several if the ids have too many characters or the scope is too long and may be split."""
    split = rule.split_scopes and sum(seconds for _, seconds in tests) > fair
    share = fair / _DIVISOR if split else float("inf")
    queue = deque(_Unit((id,), seconds) for id, seconds in tests)
    while queue:
        taken = _take(queue, share)
        yield _Unit(tuple(one for unit in taken for one in unit.ids), sum(unit.seconds for unit in taken))
