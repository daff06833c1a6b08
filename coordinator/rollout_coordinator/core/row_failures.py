"""Events about rows that failed for good: the first of each cause, so many of a run, and the number of the rest."""

from __future__ import annotations

from rollout.model.item import INVALID, Outcome

from rollout_coordinator.core.reasons import alike, first_line
from rollout_coordinator.core.state import Log, Run, State
from rollout_coordinator.core.step import Emit, ResultRows

TOLD_MAX = 20
ERROR_MAX = 300


def note(state: State, log: Log, rows: ResultRows) -> None:
    """Report accepted failures. Rows that cannot be used are only counted; they are known already."""
    run = log.run
    for i, failure in rows.failures.items():
        if rows.outcome[i] is not Outcome.FAILED:
            continue
        if failure.code == INVALID:
            log.invalid += 1
            continue
        error = first_line(failure.message)[:ERROR_MAX]
        cause = (failure.code, alike(error)) if len(run.failures_told) < TOLD_MAX else None
        if cause is None or cause in run.failures_told:
            run.failures_untold += 1
            continue
        run.failures_told.add(cause)
        fields = {
            "run_id": run.id, "row": _row(state, log, rows.seq[i]), "worker": rows.worker, "code": failure.code,
            "error": error,
        }  # fmt: skip
        state.step.sends.append(Emit("row_failed", "warning", fields, logged=False))


def tell_rest(state: State, run: Run) -> None:
    """Report the rest when the run ends."""
    if run.failures_untold:
        fields = {"run_id": run.id, "count": run.failures_untold}
        state.step.sends.append(Emit("more_rows_failed", "warning", fields, logged=False))
        run.failures_untold = 0


def _row(state: State, log: Log, seq: int) -> str:
    """Return the row number as users write it: `43`, and `43.2` for the second child of row 43."""
    row = str(seq + 1)
    while log.parent is not None:
        row = f"{log.parent.seq + 1}.{row}"
        log = state.logs[log.parent.log]
    return row
