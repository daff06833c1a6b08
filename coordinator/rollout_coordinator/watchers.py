"""Watchers of runs. Wakes are cheap and merge, so many watchers cost the driver next to nothing."""

from __future__ import annotations

import asyncio


class Watch:
    """A watcher of a run: `wait` returns once per burst of changes."""

    def __init__(self) -> None:
        self._moved = asyncio.Event()
        self._moved.set()  # look once at the start

    def wake(self) -> None:
        self._moved.set()

    async def wait(self, timeout: float) -> None:
        """Wait until the run changes, for at most `timeout` seconds."""
        if not self._moved.is_set():
            handle = asyncio.get_running_loop().call_later(timeout, self._moved.set)
            try:
                await self._moved.wait()
            finally:
                handle.cancel()
        self._moved.clear()


class Watchers:
    def __init__(self) -> None:
        self._runs: dict[str, set[Watch]] = {}

    @property
    def count(self) -> int:
        return sum(len(watches) for watches in self._runs.values())

    def add(self, run_id: str) -> Watch:
        watch = Watch()
        self._runs.setdefault(run_id, set()).add(watch)
        return watch

    def remove(self, run_id: str, watch: Watch) -> None:
        watches = self._runs.get(run_id)
        if watches is not None:
            watches.discard(watch)
            if not watches:
                del self._runs[run_id]

    def moved(self, run_id: str) -> None:
        for watch in self._runs.get(run_id, ()):
            watch.wake()

    def wake_all(self) -> None:
        for watches in self._runs.values():
            for watch in watches:
                watch.wake()
