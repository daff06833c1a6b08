"""The policy `skip_rest`: counts for a run's root log, and decides when what has not begun is skipped.

It counts results as they are accepted, and failed attempts, so that it need not wait for a result of an item that is
retried again and again. The counts are in `Log.progress`, and so in the log's row.
"""

from __future__ import annotations

from rollout.model.item import Outcome
from rollout.model.run import ENDED, RunState

from rollout_coordinator.core.limits import Limits
from rollout_coordinator.core.state import Log, State, touch
from rollout_coordinator.core.step import ResultRows
from rollout_coordinator.core.transitions import REST, RestState

_NAMED_MAX = 3
_CENT = 10_000  # in millionths of a dollar
WRITTEN_EVERY_MS = 10_000
"""Maximum running time in milliseconds that is lost when the coordinator dies."""


def skip_rest(log: Log, reason: str) -> None:
    """Skip what has not begun from now on."""
    REST.move(log.rest, "limit")
    log.progress.rest.why = reason


# ---- counting


def count_results(log: Log, rows: ResultRows) -> None:
    """Count accepted results: DONE is good, and so is a failure with none of the codes."""
    limits = _watched(log)
    if limits is None:
        return
    count_units(log, sum(rows.units_in), sum(rows.units_out))
    bad = 0
    for index, failure in rows.failures.items():
        if rows.outcome[index] is Outcome.FAILED and failure.code in limits.codes:
            bad += 1
            _add_code(log, failure.code, 1)
    ended = sum(1 for outcome in rows.outcome if outcome in (Outcome.DONE, Outcome.FAILED))
    log.progress.rest.bad += bad
    log.progress.rest.good += ended - bad


def count_units(log: Log, units_in: int, units_out: int) -> None:
    """Count units of the log's own items; children may count in other units."""
    if _watched(log) is not None:
        log.progress.rest.units_in += units_in
        log.progress.rest.units_out += units_out


def count_failed(log: Log, before: str, code: str) -> None:
    """Count an attempt that failed with `code` while its item continues; its last failure before had the code `before`.
    An item counts against the run as long as its last failure does."""
    limits = _watched(log)
    if limits is not None:
        log.progress.rest.again += (code in limits.codes) - (before in limits.codes)
        for one, n in ((code, 1), (before, -1)):
            if one in limits.codes:
                _add_code(log, one, n)


def count_over(log: Log, code: str, n: int) -> None:
    """Count `n` items that have a result; their last failed attempt, if any, had this code."""
    limits = _watched(log)
    if limits is not None and code in limits.codes:
        log.progress.rest.again -= n
        _add_code(log, code, -n)


# ---- deciding


def reached(log: Log) -> str:
    """Return which limit the run has newly reached, for people, or an empty string."""
    limits = _watched(log)
    if limits is None or log.run.state in ENDED or log.rest is RestState.SKIPPED:
        return ""
    counts = log.progress.rest
    used = (limits.used[0] + counts.units_in, limits.used[1] + counts.units_out)
    for name, amount, most in zip(limits.named, used, (limits.units_in, limits.units_out), strict=True):
        if most and amount >= most:
            return f"{_amount(amount, name)} were used, of at most {_amount(most, name).removesuffix(f' {name}')}"
    if limits.wall_ms and limits.used_ms + counts.ran_ms >= limits.wall_ms:
        return f"it has run for {limits.wall_ms // 1000:,} s, the longest it may"
    bad = counts.bad + counts.again
    of = bad + counts.good
    if limits.codes and of >= limits.after and 100 * (of - bad) < limits.min_percent * of:
        codes = sorted(counts.codes.items(), key=lambda pair: -pair[1])
        seen = [f"{code} {n:,}" for code, n in codes if n > 0]
        listed = ", ".join(seen[:_NAMED_MAX]) + (", ..." if len(seen) > _NAMED_MAX else "")
        how = f" {limits.fault}" if limits.fault else ""
        rate = limits.rate or f"{limits.min_percent} % that do not"
        return f"{bad:,} of {of:,} {limits.items} failed{how} ({listed}); the limit is {rate}"
    return ""


def _amount(units: int, name: str) -> str:
    if name != "$":
        return f"{units:,} {name}"
    return f"${units / 1e6:,.2f}" if units >= _CENT else f"${units / 1e6:.6f}".rstrip("0")


def tick(state: State) -> None:
    """Add running time to runs that are limited by it. Called at every scan."""
    for run in state.runs.values():
        limits = run.limits
        if limits is None or not limits.wall_ms:
            continue
        ran_ms = int((state.now.mono - run.looked_at) * 1000)
        run.looked_at += ran_ms / 1000
        if run.state is not RunState.RUNNING or run.root.rest is RestState.SKIPPED:
            continue
        before = run.root.progress.rest.ran_ms
        run.root.progress.rest.ran_ms += ran_ms
        if (before + ran_ms) // WRITTEN_EVERY_MS > before // WRITTEN_EVERY_MS:
            touch(state, run.root)
        if limits.used_ms + before + ran_ms >= limits.wall_ms:
            state.effects.limited[run.id] = run


def _watched(log: Log) -> Limits | None:
    return log.run.limits if log.parent is None else None


def _add_code(log: Log, code: str, n: int) -> None:
    codes = log.progress.rest.codes
    codes[code] = codes.get(code, 0) + n
