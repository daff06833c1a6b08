"""How much unfinished work the worker asks for: enough that it never idles for a round trip, and no more. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout.model.worker import Credit

CREDIT_MAX = 2048
ADAPT_S = 0.1
"""Work finished within this time, or twice that which an answer takes where that is longer, is about what a worker must
hold while an answer is on its way. Twice: all that was held at its beginning ends within it, if it ends so fast."""
SHARERS = 8
"""So many times its own pace a run's credit may follow that of all at once, and beyond that by doubling: one attempt of
three seconds that happens to end is no pace."""
_SMOOTHING = 0.125
"""Weight of a new sample of the time to an answer, as TCP's for its round trip (RFC 6298, section 2)."""


class CreditKeeper:
    """Twice what runs at once, per run; more where attempts end too fast for it; 1 where none starts."""

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
        """So long after a result was told, the answer to it was here: two ways, and the commit between them."""
        before = self.answer_s or seconds
        self.answer_s = before + _SMOOTHING * (seconds - before)

    def knows(self, run_id: str, key: str) -> bool:
        """Whether it was told of processes of `key` for that run."""
        return key in self._floors.get(run_id, ())

    def started(self, run_id: str, key: str, width: int) -> bool:
        """A process of `key` takes `width` at once. Whether the credit changed, as of the other methods."""
        self._floors.setdefault(run_id, {})[key] = max(self.base, 2 * width)
        return self._set(run_id, self._floor(run_id))

    def throttle(self, run_id: str, key: str) -> bool:
        """No process of `key` starts here: if that is all the run has, one attempt at a time finds out when it does."""
        self._floors.setdefault(run_id, {})[key] = 1
        return self._set(run_id, self._floor(run_id))

    def _floor(self, run_id: str) -> int:
        return max(self._floors.get(run_id, {}).values(), default=self.base)

    def forget(self, run_id: str) -> bool:
        self._floors.pop(run_id, None)
        self._ended.pop(run_id, None)
        return self._items.pop(run_id, None) is not None

    def adapt(self, now: float, holds: Callable[[], Mapping[str, int]]) -> bool:
        """`holds`: how many attempts there are of each run. Whether the credit changed.

        Each run has the credit that it would have alone, since the coordinator divides the largest among those that
        want a worker: what ended of all of them counts. But a run must keep that pace: much of what it had has ended.
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
