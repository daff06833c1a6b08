"""Messages about a running run beside its progress: why it does not progress, and what changed."""

from __future__ import annotations

import time

from rollout.cli.progress import Display
from rollout.cli.show import cannot_start, cause_json, waiting
from rollout.cli.words import first_line
from rollout.wire.v1 import runs_pb2 as pb

IDLE_S = 30.0
"""Seconds without work after which a message says where to look."""
NO_WORKERS_S = 10.0
"""The same if no worker is connected; those of a private cluster take a few seconds to connect."""
IMPOSSIBLE_S = 5.0
"""The same if no connected worker could ever run what is pending."""
GONE = {"disk_full": "there is room again", "store_unavailable": "the object store answers again"}
"""Message, by code of a cause that interrupts work, for when the cause is over."""


class Telling:
    """Messages of one run to `display`, each once."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._busy_at = time.monotonic()
        self._idle_told = self._skipping_told = False
        self._causes_told: dict[tuple[str, str, str], tuple[int, bool]] = {}

    def tell(self, status: pb.RunStatus, *, is_waiting: bool) -> None:
        """Report what is new in `status`. `is_waiting` says that the run has nothing to do at present."""
        self._tell_skipping(status)
        self._tell_causes(status)
        self._tell_gone(status)
        self._tell_idle(status, is_waiting)

    def _tell_skipping(self, status: pb.RunStatus) -> None:
        if status.skips_rest and not self._skipping_told:
            self._skipping_told = True
            message = f"what has not begun is skipped: {first_line(status.reason)}; {status.running} still running"
            self._display.event("rest_skipped", message, reason=status.reason)

    def _tell_causes(self, status: pb.RunStatus) -> None:
        """Report each cause once, and again when it has reached more workers, or all."""
        for cause in status.causes:
            about = (cause.executor, cause.code, cause.message)
            reached = (len(cause.workers), cause.everywhere)
            told = self._causes_told.get(about)
            if told is not None and told >= reached:
                continue
            self._causes_told[about] = reached
            if told is None:
                message = cannot_start(cause)
            else:
                where = "all workers that could run it" if cause.everywhere else f"{len(cause.workers)} workers"
                message = f"the same on {where} now ({cause.times} tries): {first_line(cause.message)}"
            self._display.event("cause", message, **cause_json(cause))

    def _tell_gone(self, status: pb.RunStatus) -> None:
        """Report that a cause which interrupted work is over."""
        there = {(cause.executor, cause.code, cause.message) for cause in status.causes}
        for about in [about for about in self._causes_told if about[1] in GONE and about not in there]:
            del self._causes_told[about]
            if status.state == "running" and not any(cause[1] == about[1] for cause in there):
                self._display.event("cause_gone", f"the run goes on: {GONE[about[1]]}", code=about[1])

    def _tell_idle(self, status: pb.RunStatus, is_waiting: bool) -> None:
        stuck = any(wait.impossible for wait in status.waits)  # what runs may wait for it
        if is_waiting or (status.running and not stuck) or status.causes or status.state != "running":
            self._busy_at, self._idle_told = time.monotonic(), False
            return
        idle_s = time.monotonic() - self._busy_at
        patience_s = IDLE_S
        if any(wait.reason == "no_workers" for wait in status.waits):
            patience_s = NO_WORKERS_S
        if stuck:
            patience_s = IMPOSSIBLE_S
        if self._idle_told or idle_s < patience_s:
            return
        self._idle_told = True
        starting = all(wait.reason == "chain" for wait in status.waits)  # the first of the chain does not run either
        why = "engines may still be loading; " if starting else f"what it waits for:\n{waiting(status)}\n"
        what = "no worker can take a part of this run" if status.running else "no worker has had anything of this run"
        self._display.note(
            f"{what} for {idle_s:.0f} s: {why}"
            "`rollout workers` lists those that are connected, `rollout-worker run` starts one"
        )
