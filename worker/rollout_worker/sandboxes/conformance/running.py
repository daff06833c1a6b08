"""Runs the suite on a provider."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_worker.sandboxes.bubblewrap import open_bubblewrap
from rollout_worker.sandboxes.conformance.suite import (
    CASES,
    Bench,
    NotApplicableError,
)
from rollout_worker.sandboxes.local import LocalProvider
from rollout_worker.sandboxes.process import open_process

PROVIDERS: dict[str, Callable[[Path], LocalProvider]] = {
    "process": open_process,
    "process-without-namespaces": lambda state: open_process(state, namespaces=False),
    "bubblewrap": open_bubblewrap,
    "bubblewrap-without-overlay": lambda state: open_bubblewrap(state, overlay=False),
}


@dataclass(frozen=True)
class Outcome:
    name: str
    outcome: str  # passed | failed | not applicable
    text: str = ""
    seconds: float = 0.0


async def run(
    bench: Bench, names: frozenset[str] = frozenset(), tell: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run all cases, or those named."""
    outcomes: list[Outcome] = []
    for one in CASES:
        if names and one.name not in names:
            continue
        begun = time.monotonic()
        outcome, text = "passed", ""
        try:
            await one.run(bench)
        except NotApplicableError as error:
            outcome, text = "not applicable", str(error)
        except Exception as error:  # noqa: BLE001 - whatever a provider raises is an outcome
            outcome, text = "failed", "".join(traceback.format_exception(error))
        outcomes.append(Outcome(one.name, outcome, text, round(time.monotonic() - begun, 3)))
        tell(outcomes[-1])
    return outcomes
