"""Workers that were declared failed, against the faults that explain it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """A fault: Unix times from strike to settled, and the worker whose failure it explains ('': any, None: no one's)."""

    begin: float
    end: float
    blames: str | None


def unexplained(
    failures: Iterable[tuple[float, str, str]], faults: Iterable[Window], killed: set[str], grace_s: float
) -> list[str]:
    """`worker_failed` at a time, of a worker and its incarnation, that nothing explains.

    A killed incarnation is found dead whenever there is a coordinator to find it. Otherwise a fault of that worker must
    have begun before and not be over for longer than `grace_s`; one that overlaps others (the coordinator may have been
    away meanwhile) is over when they are.
    """
    windows = _until_all_is_over(sorted(faults, key=lambda window: window.begin), grace_s)
    return [
        f"worker_failed of {worker} at {at:.1f} without a fault that explains it"
        for at, worker, incarnation in failures
        if incarnation not in killed
        and not any(w.begin <= at <= w.end + grace_s and w.blames in ("", worker) for w in windows)
    ]


def _until_all_is_over(windows: list[Window], grace_s: float) -> list[Window]:
    """Each with the end of those that began while it, or its grace, lasted."""
    found: list[Window] = []
    for n, window in enumerate(windows):
        end = window.end
        for later in windows[n + 1 :]:
            if later.begin > end + grace_s:
                break
            end = max(end, later.end)
        found.append(Window(window.begin, end, window.blames))
    return found
