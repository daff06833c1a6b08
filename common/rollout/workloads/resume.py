"""Resumes a run: what may differ from when it was created, what differs, and whether it is already complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from rollout.model import ids
from rollout.model.errors import ConfigError
from rollout.workloads.carrying import CARRIED
from rollout.workloads.carrying_writer import CarryingWriter
from rollout.workloads.collector import Collector
from rollout.workloads.json_form import JsonObject, lookup, short
from rollout.workloads.output import OutputDirectory, saved_state, saved_summary
from rollout.workloads.port import Checked, Workload

AnyWorkload = Workload[Any, Any]


def compare(
    workload: AnyWorkload, output: OutputDirectory, stored: JsonObject, checked: Checked, hint: str = ""
) -> list[str]:
    """Compare settings, and return notes about those that the run of `output` does not follow.

    `hint` is another way to continue, for the user. Raises ConfigError with everything that changed and must not.
    Blocking.
    """
    new, source = checked.config, checked.source
    before, changed = lookup(stored, "input.digest"), None
    if source is not None and before and before != lookup(new, "input.digest"):
        changed = source.first_change(output.index_path, before)
    if changes := describe_changes(workload, stored, new, changed):
        inputs = sum(change.startswith("input") for change in changes)
        what = "input was" if inputs == len(changes) else "input and settings were" if inputs else "settings were"
        held = ids.short(output.run_id or "")
        raise ConfigError(
            f"{output.path} holds run {held}, whose {what} changed since it was started:\n"
            + "\n".join(f"  {change}" for change in changes)
            + f"\nChange this back to go on with the run{_or_limits(workload)}, or start a new one "
            f"{workload.another_run(held, changes)}{hint}"
        )
    return describe_recorded(workload, stored, new)


def describe_changes(workload: AnyWorkload, old: JsonObject, new: JsonObject, changed: str | None = None) -> list[str]:
    """Return a line for each difference that requires another run. `changed` is the first unit of the input that
    differs, if known."""
    changes: list[str] = []
    for section in _sections(workload, old, new):
        before, after = old.get(section), new.get(section)
        special = None
        if isinstance(before, dict) and isinstance(after, dict):
            before, after = cast(JsonObject, before), cast(JsonObject, after)
            special = workload.describe_change(section, before, after)
            if special is None and section == "input" and "digest" in before and "digest" in after:
                special = _input_changes(before, after, changed)
        if special is None:
            special = [
                f"{key}: {short(was)} -> {short(now)}"
                for key, was, now in _differences(section, before, after)
                if key not in workload.recorded and key not in workload.changeable
            ]
        changes += special
    return changes


def describe_recorded(workload: AnyWorkload, old: JsonObject, new: JsonObject) -> list[str]:
    """Return changes that a resumed run ignores: it keeps the value it was submitted with."""
    return [f"{key}: the run keeps {short(was)}, not {short(now)}" for key, was, now in _recorded(workload, old, new)]


def all_changes(workload: AnyWorkload, old: JsonObject, new: JsonObject) -> str:
    """Return all differences, including settings whose change does not require another run, except limits."""
    recorded = [f"{key}: {short(was)} -> {short(now)}" for key, was, now in _recorded(workload, old, new)]
    return "; ".join(describe_changes(workload, old, new) + recorded)


def changed_limits(workload: AnyWorkload, old: JsonObject, new: JsonObject) -> dict[str, tuple[Any, Any]]:
    """Return the old and new values, by dotted key, of limits that the run follows from now on."""
    sections = dict.fromkeys(key.partition(".")[0] for key in workload.changeable)
    found = {
        key: (was, _followed(workload, key, was, now))
        for section in sections
        for key, was, now in _differences(section, old.get(section), new.get(section))
        if key in workload.changeable
    }
    return {key: (was, now) for key, (was, now) in found.items() if was != now}


def _followed(workload: AnyWorkload, key: str, was: Any, now: Any) -> Any:
    """Return the new value of a key that may change, or may change in part."""
    parts = workload.changeable_parts.get(key)
    if parts is None or not isinstance(was, dict) or not isinstance(now, dict):
        return now
    before, after = cast(JsonObject, was), cast(JsonObject, now)
    kept = {name: value for name, value in before.items() if name not in parts}
    return kept | {name: value for name, value in after.items() if name in parts}


def with_limits(config: JsonObject, changed: dict[str, tuple[Any, Any]]) -> JsonObject:
    """Return the configuration with the new limits."""
    config = {**config}
    for key, (_, now) in changed.items():
        section, _, name = key.partition(".")
        config[section] = {**config[section], name: now} if name else now
    return config


def limit_grew(old: JsonObject, new: JsonObject) -> bool:
    """Return whether the input was limited to its first rows, and now includes more."""
    was, now = lookup(old, "input.limit") or 0, lookup(new, "input.limit") or 0
    return was > 0 and (was < now or not now) and not lookup(new, "input.sample")


def rows_added(workload: AnyWorkload, output: OutputDirectory, stored: JsonObject, checked: Checked) -> int:
    """Return the number of rows added to the input, if nothing else about it changed and they could run by themselves.
    Blocking."""
    before, source = lookup(stored, "input.digest"), checked.source
    if source is None or not workload.carries or before == lookup(checked.config, "input.digest"):
        return 0
    return source.added(output.index_path, before)


def before_rows_were_added(workload: AnyWorkload, stored: JsonObject, checked: Checked) -> Checked:
    """Return the input as it was when the run was created."""
    total = checked.total if checked.carried is not None else lookup(stored, "input.rows")
    config = {key: value for key, value in checked.config.items() if key not in workload.carries}
    config |= {key: stored[key] for key in workload.carries if key in stored}
    return replace(checked, config=config, total=total, partly=True)


def _or_limits(workload: AnyWorkload) -> str:
    names = sorted(shown for key, shown in workload.changeable.items() if key.startswith("run.") or "." not in key)
    others = sorted({key.partition(".")[0] for key in workload.changeable} - {"run"} - workload.changeable.keys())
    more = "".join(f", and keys of [{section}] that change no result" for section in others)
    return f" (only limits may change: {', '.join(names)}{more})" if names else ""


def resumed_config(workload: AnyWorkload, old: JsonObject, new: JsonObject) -> JsonObject:
    """Return the configuration of a resumed run: its own, with new values of what may change."""
    return {**old, **{section: new[section] for section in workload.free if section in new}}


def collected(workload: AnyWorkload, output: OutputDirectory) -> bool:
    """Return whether the results are in the files, as far as that is known without the ledger."""
    state = saved_state(output.path)
    if state is None:  # perhaps only the state is gone
        return any((output.path / name).exists() for name in workload.result_files)
    return state["run_id"] == output.run_id and state["cursor"] > 0


def failed_without_results(workload: AnyWorkload, output: OutputDirectory, run_id: str) -> bool:
    """Return whether `run_id` failed without results, as far as an earlier command recorded it here."""
    state = saved_state(output.path)
    if state is None or state["run_id"] != run_id:
        return False
    summary = saved_summary(output.path, state) or {}
    return summary.get("state") == "failed" and (state["cursor"] == 0 or workload.failed(summary).without_results)


def finished(
    workload: AnyWorkload, output: OutputDirectory, run_id: str, config: JsonObject, checked: Checked
) -> JsonObject | None:
    """Return the summary of a run that was completed and collected, so that nothing has to start. Blocking."""
    state = saved_state(output.path)
    if state is None or state.get("summary") is None:
        return None  # before all of what is written is read, to no end
    collector = open_collector(workload, output, run_id, config, checked.total)
    try:
        summary = collector.summary
        if summary is not None and checked.queue is not None:
            collector.expect(summary[workload.unit]["total"])
        completed = summary is not None and summary.get("state") == "completed"
        return summary if completed and collector.complete else None
    finally:
        collector.close()


def open_collector(
    workload: AnyWorkload, output: OutputDirectory, run_id: str, config: JsonObject, total: int, *, alone: bool = False
) -> Collector:
    """Open the collector of a run of `total` units. `alone` is that of `CarryingWriter`. Blocking."""
    writer = workload.writer(config)
    if config.get(CARRIED):
        writer = CarryingWriter(writer, config, workload.unit, alone=alone)
    return Collector(output, run_id, writer, total=total, unit=workload.unit, measure=workload.measure)


def _recorded(workload: AnyWorkload, old: JsonObject, new: JsonObject) -> Iterator[tuple[str, Any, Any]]:
    for section in _sections(workload, old, new):
        for key, was, now in _differences(section, old.get(section), new.get(section)):
            if key in workload.changeable_parts:
                yield from _differences(key, _followed(workload, key, was, now), now)
            elif key in workload.recorded and key not in workload.changeable and (key, now) != ("run.name", ""):
                yield key, was, now


def _sections(workload: AnyWorkload, old: JsonObject, new: JsonObject) -> list[str]:
    return [section for section in dict.fromkeys([*new, *old]) if section not in workload.free]


def _differences(section: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(old, dict) or not isinstance(new, dict):
        if old != new:
            yield section, old, new
        return
    before, after = cast(JsonObject, old), cast(JsonObject, new)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{section}.{key}", before.get(key), after.get(key)


def _input_changes(old: JsonObject, new: JsonObject, changed: str | None) -> list[str]:
    if old["digest"] == new["digest"]:
        before, after = old.get("invalid", 0), new.get("invalid", 0)
        if before == after:
            return []
        return [
            f"input: {before:,} of its rows could not be used when the run began, and now {after:,}: what says which "
            "can (such as input.model_in_rows) was changed"
        ]
    parts = [(f"input.{key}", old.get(key), new.get(key)) for key in ("limit", "sample", "sample_seed")]
    if selected := [f"{key}: {short(was)} -> {short(now)}" for key, was, now in parts if was != now]:
        return selected
    if changed:
        return [f"input: {changed}"]
    before = [(file["digest"], file["path"]) for file in old.get("files", [])]
    after = [(file["digest"], file["path"]) for file in new.get("files", [])]
    if not before or not after:
        return ["input: it is another than before"]
    if sorted(before) == sorted(after):
        return ["input: the same files in another order"]
    known = {path: digest for digest, path in before}
    changes = [
        f"input: the rows of {path} changed" if path in known else f"input: {path} was added"
        for digest, path in after
        if known.get(path) != digest
    ]
    gone = sorted(known.keys() - {path for _, path in after})
    return [*changes, *(f"input: {path} is missing" for path in gone)]
