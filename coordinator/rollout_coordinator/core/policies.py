"""Commit-time policies, by name. They see results in commit order, one at a time, and decide there and nowhere else.

- `prune_lane {after: K, lane: NAME?}`: K consecutive failures in a lane prune it: pending items and accepted results
  behind that point are skipped. Without `lane` every named lane is watched.
- `stop_early {failures: N}` fails the run, `stop_early {successes: N}` completes it, once N results say so.
- `end_run {on: failed|done, state: failed|completed?}`: the first such result ends the run.
- `keep_objects {last: N?, max_age_s: S?, from: SEQ?, spare: K?}`: at each result that names objects, those that results
  from SEQ on name are let go unless they are among the last N, and those that are S seconds older. What results before
  SEQ name stays, and what the newest names. What failures name counts for nothing, and goes with the first result
  behind it that is let go. Of the objects that a result names, the last K are spared: they stay as long as the run.
- `skip_rest {units_in: N?, units_out: N?, wall_s: S?, codes: A,B?, min_percent: P?, after: N?}`: what has not begun is
  skipped, and the run completes with what has, once results and failed attempts have used so many units, it has run for
  S seconds, or of at least N items fewer than P percent do not fail with one of these codes. `used_in`, `used_out`,
  `used_s`: what of that was used before the run. For people: `unit_in` and `unit_out`: what the units are called ("$":
  millionths of a dollar); `items`: what items are; `fault`: how those with one of the codes failed; `rate`: what
  `min_percent` was given as.
- `append {on: failed|done, times: N?, limit: M?}`: each such result of an item appends a copy of it at the end of a
  sealed run, up to N copies of copies and M items in all.

`skip_rest` alone is no matter of the order of results (`run_limits.py`). A policy only decides; `commit.py` acts. What
it has to remember it keeps in `Log.progress`, which is in the log's row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.model.errors import InputError
from rollout.model.item import Outcome
from rollout.model.run import Policy, RunSpec

from rollout_coordinator.core.limits import Limits
from rollout_coordinator.core.object_retention import failures_between
from rollout_coordinator.core.state import Log, Run, SpecInfo


@dataclass(frozen=True, slots=True)
class PruneLane:
    """Prune the lane of the committed item there."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """End the run. `cause` is a row of the run table: complete | fail."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Release what these results name."""

    seqs: tuple[int, ...]


Decision = PruneLane | EndRun | LetGo | None
Decide = Callable[[Log, int, Outcome, SpecInfo], Decision]

_ON = {"failed": Outcome.FAILED, "done": Outcome.DONE}
_OPTIONS = {
    "prune_lane": ("after", "lane"),
    "stop_early": ("failures", "successes"),
    "end_run": ("on", "state"),
    "keep_objects": ("last", "max_age_s", "from", "spare"),
    "skip_rest": (
        *("units_in", "units_out", "wall_s", "codes", "min_percent", "after"),
        *("used_in", "used_out", "used_s", "unit_in", "unit_out", "items", "fault", "rate"),
    ),
    "append": ("on", "times", "limit"),
}


@dataclass(slots=True)
class Compiled:
    name: str
    decide: Decide | None  # None: it asks for no result by itself
    options: dict[str, str] = field(default_factory=dict[str, str])
    limits: Limits | None = None


def number(policy: Policy, options: dict[str, str], key: str, default: int = 0) -> int:
    text = options.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InputError(f"policy {policy.name}: {key} must be a whole number of at most 18 digits, got {text[:40]!r}")
    return int(text)


def compile_policies(spec: RunSpec) -> list[Compiled]:
    """Compile the policies. Raises InputError if a policy or one of its options is unknown."""
    out: list[Compiled] = []
    for policy in spec.policies:
        options = dict(policy.options)
        if policy.name not in _OPTIONS:
            raise InputError(f"unknown policy {policy.name!r}; known are {', '.join(_OPTIONS)}")
        for key in options:
            if key not in _OPTIONS[policy.name]:
                raise InputError(
                    f"policy {policy.name} has no option {key!r}; it takes {', '.join(_OPTIONS[policy.name])}"
                )
        if policy.name == "skip_rest":
            out.append(Compiled(policy.name, None, options, _limits(policy, options)))
        else:
            out.append(Compiled(policy.name, _MAKERS[policy.name](policy, options), options))
    if sum(one.limits is not None for one in out) > 1:
        raise InputError("policy skip_rest is there twice: give all limits in one")
    return out


def _limits(policy: Policy, options: dict[str, str]) -> Limits:
    codes = frozenset(code.strip() for code in options.get("codes", "").split(",") if code.strip())
    limits = Limits(
        number(policy, options, "units_in"),
        number(policy, options, "units_out"),
        1000 * number(policy, options, "wall_s"),
        codes,
        number(policy, options, "min_percent"),
        max(1, number(policy, options, "after", 1)),
        (options.get("unit_in", "units in"), options.get("unit_out", "units out")),
        (number(policy, options, "used_in"), number(policy, options, "used_out")),
        1000 * number(policy, options, "used_s"),
        options.get("items", "items"),
        options.get("fault", ""),
        options.get("rate", ""),
    )
    if bool(codes) != bool(limits.min_percent) or limits.min_percent > 100:
        raise InputError("policy skip_rest: `codes` and `min_percent`, from 1 to 100, go together")
    if not (limits.units_in or limits.units_out or limits.wall_ms or codes):
        raise InputError("policy skip_rest: give `units_in`, `units_out`, `wall_s`, or `codes` with `min_percent`")
    return limits


def _prune_lane(policy: Policy, options: dict[str, str]) -> Decide:
    after, only = number(policy, options, "after", 3), options.get("lane", "")
    if after < 1:
        raise InputError("policy prune_lane: `after` must be at least 1")

    def decide(log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> Decision:
        lane = info.lane
        watched = lane.name and (not only or lane.name == only)
        return PruneLane() if watched and lane.pruned_at < 0 and lane.consecutive >= after else None

    return decide


def _stop_early(policy: Policy, options: dict[str, str]) -> Decide:
    failures, successes = number(policy, options, "failures"), number(policy, options, "successes")
    if not failures and not successes:
        raise InputError("policy stop_early: give `failures` or `successes`")

    def decide(log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> Decision:
        tally = log.progress.tally
        tally[0] += outcome is Outcome.FAILED
        tally[1] += outcome is Outcome.DONE
        if failures and tally[0] >= failures:
            return EndRun("fail", f"stop_early: {failures} items failed")
        if successes and tally[1] >= successes:
            return EndRun("complete", f"stop_early: {successes} items are done")
        return None

    return decide


def _end_run(policy: Policy, options: dict[str, str]) -> Decide:
    on, to = options.get("on", "failed"), options.get("state", "")
    if on not in _ON or to not in ("", "failed", "completed"):
        raise InputError("policy end_run: `on` is failed or done, `state` is failed or completed")
    cause = "complete" if (to or ("failed" if on == "failed" else "completed")) == "completed" else "fail"

    def decide(log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> Decision:
        return EndRun(cause, f"end_run: row {seq + 1} is {on}") if outcome is _ON[on] else None

    return decide


def _keep_objects(policy: Policy, options: dict[str, str]) -> Decide:
    last, first = number(policy, options, "last"), number(policy, options, "from")
    max_age_ms = 1000 * number(policy, options, "max_age_s")
    number(policy, options, "spare")
    if not last and not max_age_ms:
        raise InputError("policy keep_objects: give `last` or `max_age_s`, at least 1")

    def decide(log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> Decision:
        kept = log.progress.kept
        committed = [(one, at_ms) for one, at_ms in kept if first <= one <= seq]
        if not committed or committed[-1][0] != seq:
            return None
        now_ms = committed[-1][1]
        beyond = len(committed) - last if last else 0
        gone = {
            one
            for index, (one, at_ms) in enumerate(committed[:-1])
            if index < beyond or (max_age_ms and now_ms - at_ms > max_age_ms)
        }
        if not gone:
            return None
        log.progress.kept = [entry for entry in kept if entry[0] not in gone]
        gone.update(failures_between(log, first, max(gone)))
        return LetGo(tuple(sorted(gone)))

    return decide


def _append(policy: Policy, options: dict[str, str]) -> Decide:
    on, times, limit = (
        options.get("on", "failed"),
        number(policy, options, "times", 1),
        number(policy, options, "limit"),
    )
    if on not in _ON:
        raise InputError("policy append: `on` is failed or done")

    def decide(log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> Decision:
        if outcome is not _ON[on]:
            return None
        origin = log.progress.origin
        first, generation = origin.get(seq, (seq, 0))
        queue = log.progress.append
        if generation < times and (not limit or len(origin) + len(queue) < limit):
            queue.append((first, generation + 1))
        return None

    return decide


_MAKERS: dict[str, Callable[[Policy, dict[str, str]], Decide]] = {
    "prune_lane": _prune_lane,
    "stop_early": _stop_early,
    "end_run": _end_run,
    "keep_objects": _keep_objects,
    "append": _append,
}


def wants_more(run: Run) -> bool:
    """Return whether an `append` is still to be carried out, so that the run is not complete."""
    return bool(run.root.progress.append)
