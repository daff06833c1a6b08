"""`--dry-run`: says what a workload's command would do, and finds faults without starting anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from rollout.cli.boundary import OK
from rollout.cli.checking import noted, verdict
from rollout.cli.named_snapshots import NamedSnapshots
from rollout.cli.progress import display_for
from rollout.cli.run_place import target_of
from rollout.cli.work_options import Options
from rollout.client.private import STATE_DIR
from rollout.client.target import private_target
from rollout.workloads.output import claimed
from rollout.workloads.port import Checked, Workload


def dry_run(workload: Workload[Any, Any], settings: BaseModel, options: Options, of_host: list[str]) -> int:
    """Return the exit code. `of_host` are notes about this machine. Raises ConfigError or InputError with all
    faults."""
    display = display_for(json=options.json)
    found = verdict(workload, settings, lambda text: display.step(text) if text else None)
    for note in (*found.notes, *map(noted, of_host)):
        display.note(note)
    fields = found.fields
    find_named_now(workload, settings, found.checked, options, display.note)
    plain = {key: value for key, value in fields.items() if isinstance(value, str | int | float)}
    inputs = "" if workload.endless else "rows" if "rows" in plain else workload.unit
    said = " ".join(f"{'inputs' if key == inputs else key}={value}" for key, value in plain.items())
    lines = [*found.plan, f"dry-run OK: {said}"]
    display.event("dry_run", "\n".join(lines), **fields, plan=found.plan)
    return OK


def find_named_now(
    workload: Workload[Any, Any], settings: BaseModel, checked: Checked, options: Options, note: Callable[[str], None]
) -> None:
    """Check that what the configuration names of other runs exists and fits. Blocking.

    Raises ConfigError or NotFoundError. A resumed run keeps what it began with, so nothing is checked for it.
    """
    output = workload.directory(settings).expanduser()
    if not checked.snapshots or claimed(output) is not None:
        return
    target = target_of(options)
    target = target if target.addresses else private_target(output / STATE_DIR, target.why)
    asyncio.run(NamedSnapshots(workload, target, output, note).find(checked, checked.snapshots))
