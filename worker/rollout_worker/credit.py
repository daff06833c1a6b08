"""Credit: unfinished work that the worker asks for, so that it never idles for a round trip and holds no more. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout.model.worker import Credit

CREDIT_MAX = 2048
ADAPT_S = 0.1
"""Seconds whose finished work is about what a worker must hold while an answer is in transit; at least twice the answer
time, within which everything held at its start ends, if it ends that fast."""
SHARERS = 8
"""Factor by which a run's credit may follow the pace of all runs at once; beyond it, credit doubles. One attempt of
three seconds that happens to end is no pace."""
_SMOOTHING = 0.125
"""Weight of a new sample of the answer time, as in TCP's round-trip estimate (RFC 6298, section 2)."""


class CreditKeeper:
    """Credit per run: twice what runs at once, more if attempts end too fast for that, 1 if none starts."""

    def __init__(self, slots: int, bytes: int) -> None:
        self.base = 2 * slots
        self._bytes = bytes
        self._floors: dict[str, dict[str, int]] = {}  # of a run, by where its attempts execute
        self._items: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self.answer_s = 0.0  # from results to the answer, smoothed; 0 before the first
        self._adapted_at = 0.0

    def current(self) -> Credit:
        return Credit(self.base, self._bytes, tuple(sorted(self._items.items())))

    def ended(self, run_id: str) -> None:
        self._ended[run_id] = self._ended.get(run_id, 0) + 1

    def answered(self, seconds: float) -> None:
        """Record the seconds between a result and its answer: two ways, and the commit between them."""
        before = self.answer_s or seconds
        self.answer_s = before + _SMOOTHING * (seconds - before)

    def knows(self, run_id: str, key: str) -> bool:
        """Return whether processes of `key` are known for that run."""
        return key in self._floors.get(run_id, ())

    def started(self, run_id: str, key: str, width: int) -> bool:
        """Record that a process of `key` takes `width` at once. Returns, as the other methods do, whether the credit
        changed."""
        self._floors.setdefault(run_id, {})[key] = max(self.base, 2 * width)
        return self._set(run_id, self._floor(run_id))

    def throttle(self, run_id: str, key: str) -> bool:
        """Record that no process of `key` starts; if the run has no other, one attempt at a time probes for a start."""
        self._floors.setdefault(run_id, {})[key] = 1
        return self._set(run_id, self._floor(run_id))

    def _floor(self, run_id: str) -> int:
        return max(self._floors.get(run_id, {}).values(), default=self.base)

    def forget(self, run_id: str) -> bool:
        self._floors.pop(run_id, None)
        self._ended.pop(run_id, None)
        return self._items.pop(run_id, None) is not None

    def adapt(self, now: float, holds: Callable[[], Mapping[str, int]]) -> bool:
        """Adapt the credit and return whether it changed. `holds` returns the number of attempts by run.

        Each run has the credit it would have alone, because the coordinator divides the largest among those that want a
        worker: what ended of all of them counts. But a run must keep that pace, that is, much of what it had must have
        ended.
        """
        if now - self._adapted_at < max(ADAPT_S, 2 * self.answer_s):
            return False
        self._adapted_at = now
        changed = False
        runs = {**self._ended, **self._items}
        have: Mapping[str, int] = holds() if len(runs) > 1 else {}
        everything = sum(self._ended.values())
        for run_id in runs:
            floor = self._floor(run_id)
            if floor < self.base:
                continue  # throttled
            ended, had = self._ended.get(run_id, 0), have.get(run_id, 0)
            items = self._items.get(run_id, self.base)
            if ended and 2 * everything >= items and 2 * ended >= had:
                # At once to what the pace asks for: by steps, a run of short attempts is over before it gets there.
                items = max(floor, min(2 * max(items, min(everything, SHARERS * ended)), CREDIT_MAX))
            elif 8 * everything < items or 8 * ended < had or not ended:
                items = max(floor, items // 2)
            changed |= self._set(run_id, items)
        self._ended.clear()
        return changed

    def _set(self, run_id: str, items: int) -> bool:
        if self._items.get(run_id, self.base) == items:
            return False
        self._items[run_id] = items
        return True
