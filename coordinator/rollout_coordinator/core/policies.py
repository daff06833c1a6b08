"""Commit-time policies, by name. They see results in commit order, one at a time, and act there and nowhere else.

- `prune_lane {after: K, lane: NAME?}`: K consecutive failures in a lane prune it: pending items and accepted results
  behind that point are skipped. Without `lane` every named lane is watched.
- `stop_early {failures: N}` fails the run, `stop_early {successes: N}` completes it, once N results say so.
- `end_run {on: failed|done, state: failed|completed?}`: the first such result ends the run.
- `append {on: failed|done, times: N?, limit: M?}`: each such result of an item appends a copy of it at the end of a
  sealed run, up to N copies of copies and M items in all.
- groups (`first_success`, from the items' own specs): the first member that is done cancels the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3
from rollout.model.errors import InputError
from rollout.model.item import Failure, Outcome
from rollout.model.run import Policy, RunSpec, RunState

from rollout_coordinator.core.events import Loaded
from rollout_coordinator.core.state import LaneState, LoadNote, Log, Run, SpecInfo, SpecQueue, State
from rollout_coordinator.core.step import LoadItems
from rollout_coordinator.core.window import arrived_at_thief, count, verdict_on

_ON = {"failed": Outcome.FAILED, "done": Outcome.DONE}
_OPTIONS = {
    "prune_lane": ("after", "lane"),
    "stop_early": ("failures", "successes"),
    "end_run": ("on", "state"),
    "append": ("on", "times", "limit"),
}


@dataclass(slots=True)
class Compiled:
    name: str
    act: Callable[[State, Log, int, Outcome, SpecInfo], None]
    options: dict[str, str] = field(default_factory=dict[str, str])


def number(policy: Policy, options: dict[str, str], key: str, default: int = 0) -> int:
    text = options.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InputError(f"policy {policy.name}: {key} must be a whole number of at most 18 digits, got {text[:40]!r}")
    return int(text)


def compile_policies(spec: RunSpec) -> list[Compiled]:
    """InputError if a policy or an option of one is not known."""
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
        out.append(Compiled(policy.name, _MAKERS[policy.name](policy, options), options))
    return out


def _prune_lane(policy: Policy, options: dict[str, str]) -> Callable[[State, Log, int, Outcome, SpecInfo], None]:
    after, only = number(policy, options, "after", 3), options.get("lane", "")
    if after < 1:
        raise InputError("policy prune_lane: `after` must be at least 1")

    def act(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
        lane = info.lane
        watched = lane.name and (not only or lane.name == only)
        if watched and lane.pruned_at < 0 and lane.consecutive >= after:
            prune(state, log, lane, seq)

    return act


def _stop_early(policy: Policy, options: dict[str, str]) -> Callable[[State, Log, int, Outcome, SpecInfo], None]:
    failures, successes = number(policy, options, "failures"), number(policy, options, "successes")
    if not failures and not successes:
        raise InputError("policy stop_early: give `failures` or `successes`")

    def act(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
        from rollout_coordinator.core import runs

        tally = log.extra.setdefault("tally", [0, 0])
        tally[0] += outcome is Outcome.FAILED
        tally[1] += outcome is Outcome.DONE
        if not runs.live(log.run):
            return
        if failures and tally[0] >= failures:
            runs.end(state, log.run, "fail", f"stop_early: {failures} items failed")
        elif successes and tally[1] >= successes:
            runs.end(state, log.run, "complete", f"stop_early: {successes} items are done")

    return act


def _end_run(policy: Policy, options: dict[str, str]) -> Callable[[State, Log, int, Outcome, SpecInfo], None]:
    on, to = options.get("on", "failed"), options.get("state", "")
    if on not in _ON or to not in ("", "failed", "completed"):
        raise InputError("policy end_run: `on` is failed or done, `state` is failed or completed")
    cause = "complete" if (to or ("failed" if on == "failed" else "completed")) == "completed" else "fail"

    def act(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
        from rollout_coordinator.core import runs

        if outcome is _ON[on] and runs.live(log.run):
            runs.end(state, log.run, cause, f"end_run: item {seq} is {on}")

    return act


def _append(policy: Policy, options: dict[str, str]) -> Callable[[State, Log, int, Outcome, SpecInfo], None]:
    on, times, limit = (
        options.get("on", "failed"),
        number(policy, options, "times", 1),
        number(policy, options, "limit"),
    )
    if on not in _ON:
        raise InputError("policy append: `on` is failed or done")

    def act(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
        if outcome is not _ON[on]:
            return
        origin: dict[str, list[int]] = log.extra.setdefault("origin", {})
        first, generation = origin.get(str(seq), [seq, 0])
        queue: list[list[int]] = log.extra.setdefault("append", [])
        if generation < times and (not limit or len(origin) + len(queue) < limit):
            queue.append([first, generation + 1])

    return act


_MAKERS: dict[str, Callable[[Policy, dict[str, str]], Callable[[State, Log, int, Outcome, SpecInfo], None]]] = {
    "prune_lane": _prune_lane,
    "stop_early": _stop_early,
    "end_run": _end_run,
    "append": _append,
}


def committed(state: State, log: Log, seq: int, outcome: Outcome, info: SpecInfo) -> None:
    """The cursor passed a result of a root log."""
    group = info.spec.group
    if group:
        members = log.members.get(group, set())
        members.discard(seq)
        if outcome is Outcome.DONE and group not in log.groups:
            log.groups[group] = seq
            close_behind(state, log, log.run.by_group[group], sorted(members), seq, flight=True)
        if not members:
            log.members.pop(group, None)
    for policy in log.run.policies:
        policy.act(state, log, seq, outcome, info)


def wants_more(state: State, run: Run) -> bool:
    """An `append` waits to be carried out: the run is not complete."""
    return bool(run.root.extra.get("append"))


def serve_appends(state: State, run: Run) -> None:
    """Copy the items that `append` asked for to the end of the sealed log. The ledger has their payloads."""
    root = run.root
    queue: list[list[int]] = root.extra.get("append", [])
    if not queue or not root.sealed or root.appending or run.state is not RunState.RUNNING:
        return
    load, state.next_load = state.next_load, state.next_load + 1
    wanted = [first for first, _ in queue]
    root.appending = True

    def found(event: Loaded) -> None:
        from rollout_coordinator.core.submit import append

        root.appending = False
        if run.state is not RunState.RUNNING:
            return
        rows = {item.seq: item for item in event.items}
        origin: dict[str, list[int]] = root.extra.setdefault("origin", {})
        for first, generation in queue[: len(wanted)]:
            row = rows[first]
            origin[str(root.submitted)] = [first, generation]
            item = blake3(b"\x01append" + row.id + generation.to_bytes(4, "big")).digest()
            append(state, root, [item], [row.payload], (run.specs[row.spec].spec,), None)
        del queue[: len(wanted)]

    state.loads[load] = LoadNote("call", root.id, found)
    state.step.loads.append(LoadItems(load, root.id, sorted(set(wanted))))


def prune(state: State, log: Log, lane: LaneState, seq: int) -> None:
    from rollout_coordinator.core.commit import touch_lane

    lane.pruned_at = seq
    touch_lane(state, log.run, lane)
    behind = [later for later, (_, spec) in log.outcomes.items() if log.run.specs[spec].lane is lane]
    close_behind(state, log, [info for info in log.run.specs if info.lane is lane], behind, seq, flight=False)


def close_behind(state: State, log: Log, infos: list[SpecInfo], members: list[int], seq: int, flight: bool) -> None:
    """End what is behind the decision taken at `seq`: pending items of these specs, and of `members`, which were given
    out, the accepted results and, if `flight`, the attempts."""
    from rollout_coordinator.core.commit import close_pending
    from rollout_coordinator.core.results import close_failed

    for later in members:
        outcome, spec = log.outcomes.get(later, (0, 0))
        if later > seq and outcome in (Outcome.DONE, Outcome.FAILED):
            log.outcomes[later] = (int(Outcome.SKIPPED), spec)
            log.counts[outcome] -= 1
            log.counts[Outcome.SKIPPED] += 1
            state.step.writes.prune.append((log.id, later, seq))
    for info in infos:
        queue = log.queues.get(info.index)
        if queue is not None and queue.size:
            verdict = verdict_on(log, info.index)
            assert verdict is not None
            close_pending(state, log, info.index, empty_queue(state, log, queue), *verdict)
    if flight:
        from rollout_coordinator.core.attempts import cancel, open_seqs

        for batch in dict.fromkeys(log.flight[one] for one in members if one in log.flight):
            verdict = verdict_on(log, batch.info.index)
            assert verdict is not None
            seqs = open_seqs(batch)
            cancel(batch.worker, [(batch, seqs)], verdict[1].code, state.step.sends)
            for one in seqs:
                if log.flight.get(one) is batch:
                    close_failed(state, batch, one, verdict[1], verdict[0])


def empty_queue(state: State, log: Log, queue: SpecQueue) -> list[int]:
    """Takes every item out of the queue."""
    seqs = [seq for chunk in queue.chunks for seq in chunk.seqs[chunk.pos :]]
    size = sum(len(p) for chunk in queue.chunks for p in chunk.payloads[chunk.pos :])
    for entry in queue.retry:
        arrived_at_thief(state, entry[3])
    seqs += [entry[0] for entry in queue.retry]
    size += sum(len(entry[2]) for entry in queue.retry)
    queue.chunks.clear()
    queue.retry.clear()
    count(log, -queue.size, -size)
    queue.size = 0
    return seqs


__all__ = ["Compiled", "Failure", "close_behind", "committed", "compile_policies", "prune", "wants_more"]
