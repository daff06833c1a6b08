"""Submission, idempotent by (run, seq, id). What is answered is durable once the step is committed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from blake3 import blake3
from rollout.model.errors import ConflictError, InputError, NotFoundError, RolloutError, StateError
from rollout.model.item import Blob, ItemSpec
from rollout.model.run import RunSpec, RunState

from rollout_coordinator.core import replay, runs
from rollout_coordinator.core.commit import finish_if_complete
from rollout_coordinator.core.events import IdsLoaded, Loaded, SubmitItems, SubmitOpen, SubmitSeal
from rollout_coordinator.core.state import Log, Run, State, reply, touch
from rollout_coordinator.core.step import Emit, ItemRows, LoadIds, LoadItems, SubmitReply
from rollout_coordinator.core.window import free_rows, place

EXECUTOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}(:[A-Za-z0-9_.-]{1,99})?")


def answer(run: Run, end: int | None = None) -> SubmitReply:
    """Return the reply. `end` is that of the submitted items; later ones may be another submitter's."""
    durable = run.root.submitted if end is None else min(run.root.submitted, end)
    return SubmitReply(run.id, durable, run.root.sealed, run.state, run.root.id)


def open_submit(state: State, event: SubmitOpen) -> None:
    if replay.load_ended_run(state, event.spec.run_id, event):
        return
    run = state.runs.get(event.spec.run_id)
    if run is None:
        try:
            run = runs.open_run(state, event.spec, event.by, event.address)
        except RolloutError as error:
            reply(state, event.request, error=error)
            return
    else:
        different = differences(run.spec, event.spec)
        if different:
            message = (
                f"run {run.id} was submitted with another configuration; different: {', '.join(different)}. "
                "Submit it as it was, or start a new run."
            )
            reply(state, event.request, error=ConflictError(message, keys=different))
            return
    reply(state, event.request, answer(run))


def differences(old: RunSpec, new: RunSpec) -> list[str]:
    """Return dotted names of what differs, empty if both mean the same run. Priority and labels may differ."""
    out = [
        name
        for name in ("workload", "name", "order", "max_in_flight", "lanes", "policies", "one_worker")
        if getattr(old, name) != getattr(new, name)
    ]
    if old.config != new.config:
        try:
            before, after = json.loads(old.config or b"{}"), json.loads(new.config or b"{}")
        except ValueError:
            return [*out, "config"]
        out += _paths(before, after, "")
    return out


def _paths(a: Any, b: Any, prefix: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        out: list[str] = []
        for key in sorted({*a, *b}, key=str):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            path = f"{prefix}.{key}" if prefix else str(key)  # pyright: ignore[reportUnknownArgumentType]
            if key not in a or key not in b:
                out.append(path)
            else:
                out += _paths(a[key], b[key], path)
        return out
    return [] if a == b else [prefix or "config"]


def submit_items(state: State, event: SubmitItems) -> None:
    run = replay.find_run(state, event, "open it first")
    if run is None:
        return
    if run.root.checking:  # keep the order of one client's messages
        run.root.held.append(event)
        return

    def done(error: RolloutError | None) -> None:
        end = event.first_seq + len(event.ids)
        reply(state, event.request, None if error else answer(run, end), error)

    add_items(
        state, run.root, event.first_seq, event.ids, event.payloads, event.specs, event.spec_index, done,
        open_for=lambda: refusal(state, run),
    )  # fmt: skip


def refusal(state: State, run: Run) -> RolloutError | None:
    """Return why the run accepts no new items, or None."""
    if run.root.sealed:
        return ConflictError(f"run {run.id} is sealed with {run.root.submitted} items; start a new run for more")
    if runs.ended(run):
        return StateError(f"run {run.id} is {run.state.value}; `resume` it first, or start a new run")
    return None


def add_items(
    state: State, log: Log, first: int, ids: list[bytes], payloads: list[Blob], specs: tuple[ItemSpec, ...],
    spec_index: list[int] | None, done: Callable[[RolloutError | None], None],
    open_for: Callable[[], RolloutError | None],
) -> None:  # fmt: skip
    """Append what is new and compare what exists; `done` is called once, maybe in a later step."""
    n = len(ids)
    if n != len(payloads) or (n and not specs) or (spec_index is not None and len(spec_index) != n):
        done(InputError("an item batch needs one payload and one spec per id"))
        return
    for spec in specs:
        if spec.executor and not EXECUTOR.fullmatch(spec.executor):
            name = repr(spec.executor[:40])
            done(InputError(f"executor {name} is no name: letters, digits, '_', '-' and '.', at most 100"))
            return
    if first > log.submitted:
        done(InputError(f"items start at seq {first}, but only {log.submitted} are there; send them without a gap"))
        return
    known = min(n, log.submitted - first)
    if known <= 0:
        error = open_for() if n else None
        if n and error is None:
            append(state, log, ids, payloads, specs, spec_index)
        done(error)
        return
    log.checking += 1

    def checked(event: IdsLoaded) -> None:
        log.checking -= 1
        error: RolloutError | None = None
        if log.id not in state.logs:
            error = NotFoundError(f"run {log.run.id} was deleted meanwhile")
        for i, (old, new) in enumerate(zip(event.ids if error is None else (), ids, strict=False)):
            if old != new:
                error = ConflictError(
                    f"seq {first + i} holds item {old.hex()[:16]}, not {new.hex()[:16]}", seq=first + i
                )
                break
        else:
            if error is None and len(event.ids) < known:
                error = ConflictError(f"seq {first + len(event.ids)} is counted but not stored")
            elif error is None and known < n:
                error = open_for()
        if error is None and known < n:
            index = None if spec_index is None else spec_index[known:]
            append(state, log, ids[known:], payloads[known:], specs, index)
        done(error)
        state.effects.unblocked.append(log)

    state.ask(log, lambda load: LoadIds(load, log.id, first, known), checked, always=True)


def append(
    state: State, log: Log, ids: list[bytes], payloads: list[Blob], specs: tuple[ItemSpec, ...],
    spec_index: list[int] | None,
) -> None:  # fmt: skip
    """Append rows to the log, and to the window if it has room and ends at the log's end."""
    run, first, n = log.run, log.submitted, len(ids)
    infos = [runs.intern_spec(state, run, spec).index for spec in specs]
    spec_of = [infos[0]] * n if spec_index is None else [infos[i] for i in spec_index]
    state.step.writes.items.append(ItemRows(log.id, first, ids, payloads, spec_of))
    direct = (
        log.window_end == first
        and not log.loading
        and not log.closed
        and free_rows(state, log) >= n
        and not log.rereading
    )
    log.submitted += n
    touch(state, log)
    if not direct:
        state.effects.window[log.id] = log
        return
    log.window_end = log.submitted
    if len(infos) == 1 or spec_index is None:
        place(state, log, infos[0], list(range(first, first + n)), ids, payloads)
        return
    at: dict[int, list[int]] = {}
    for i, spec in enumerate(spec_of):
        at.setdefault(spec, []).append(i)
    for spec, places in at.items():
        place(state, log, spec, [first + i for i in places], [ids[i] for i in places], [payloads[i] for i in places])


def seal(state: State, event: SubmitSeal) -> None:
    run = replay.find_run(state, event, "open it first")
    if run is None:
        return
    root = run.root
    if root.checking:
        root.held.append(event)
        return
    count = (root.progress.sealed_count if root.sealed else 0) or root.submitted
    if event.count != count:
        if root.sealed:
            error: RolloutError = ConflictError(f"run {run.id} is sealed with {count} items, not {event.count}")
        elif event.count > count:
            error = StateError(f"run {run.id} has {count} of {event.count} items; send the rest before sealing")
        else:
            error = ConflictError(f"run {run.id} has {count} items already, more than {event.count}")
        reply(state, event.request, error=error)
        return
    if not root.sealed:
        root.sealed = True
        if run.policies:
            root.progress.sealed_count = count
        touch(state, root)
        state.effects.accepted[root.id] = root
        fields = {"run_id": run.id, "name": run.spec.name, "items": count}
        state.step.sends.append(Emit("run_sealed", "info", fields))
        finish_if_complete(state, run)
    reply(state, event.request, answer(run))


def serve_appends(state: State, run: Run) -> None:
    """Append copies of items that an `append` policy asked for to the sealed log. The ledger has their payloads."""
    root = run.root
    queue = root.progress.append
    if not queue or not root.sealed or root.appending or run.state is not RunState.RUNNING:
        return
    wanted = [first for first, _ in queue]
    root.appending = True

    def found(event: Loaded) -> None:
        root.appending = False
        if run.state is not RunState.RUNNING:
            return
        rows = {item.seq: item for item in event.items}
        for first, generation in queue[: len(wanted)]:
            row = rows[first]
            root.progress.origin[root.submitted] = first, generation
            item = blake3(b"\x01append" + row.id + generation.to_bytes(4, "big")).digest()
            append(state, root, [item], [row.payload], (run.specs[row.spec].spec,), None)
        del queue[: len(wanted)]

    state.ask(root, lambda load: LoadItems(load, root.id, sorted(set(wanted))), found)
