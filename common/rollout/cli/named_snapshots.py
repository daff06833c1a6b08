"""Snapshots of other runs that a configuration names: found before anything starts, copied once its run is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.cli.anywhere import Places, find_named, find_snapshot
from rollout.cli.asking import once, reached
from rollout.cli.work import FIRST_PATIENCE_S
from rollout.client.run_session import RunSession
from rollout.client.snapshots import SHORT, Snapshot, bring_snapshot, pin_snapshot
from rollout.client.target import Target
from rollout.model.ids import short
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.port import Checked, Workload


class NamedSnapshots:
    """Snapshots for a run of `target` in the directory `output`.

    `note` is called with hints for the user, `step` with progress. `sources` maps an id to the cluster that has it, and
    the snapshot there.
    """

    def __init__(
        self,
        workload: Workload[Any, Any],
        target: Target,
        output: Path,
        note: Callable[[str], None],
        step: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._workload = workload
        self._output = output
        self._note = note
        self._step = step
        self.where = Places(target, False, (Path(), output.parent), once(note), takes_dir=False)
        self.sources: dict[str, tuple[Target, Snapshot]] = {}

    async def find(self, checked: Checked, keys: Sequence[str]) -> None:
        """Find what `keys` of the configuration name, in any cluster. Raises ConfigError and NotFoundError."""
        for key in keys:
            table = lookup(checked.config, key)
            target, snapshot = await find_named(self.where, table["uri"], table.get("step"))
            self._workload.found(checked, key, snapshot.as_found())
            self.sources[snapshot.id] = target, snapshot
            made = f"run {short(snapshot.run_id)} ({snapshot.run_name}), step {snapshot.step}"
            self._note(f"{table['uri']}: snapshot {snapshot.short} of {made}, in {target}")
        self._workload.finalize(checked)

    async def provide(self, session: RunSession, config: JsonObject, keys: Sequence[str]) -> None:
        """Copy the snapshots that `config` names to the cluster of `session`, which keeps them as long as the run.

        Raises NotFoundError if one is gone.
        """
        for key in keys:
            name = lookup(config, key)["snapshot"]
            if await pin_snapshot(session.runs, session.run_id, name):
                continue
            target, snapshot = self.sources.get(name) or await find_snapshot(self.where, name)

            def tell(done: int, total: int, name: str = name) -> None:
                size = f"{done * 100 // max(total, 1)} % of {total >> 21} MiB" if total >> 21 else "less than 1 MiB"
                self._step(f"bringing snapshot {name[:SHORT]}: {size}")

            scratch = self._output / f".{name[:SHORT]}.tar"
            async with reached(target, self.where.tell, patience_s=FIRST_PATIENCE_S) as (source, _):
                await bring_snapshot(source, snapshot, session.runs, session.run_id, scratch, tell)
            self._note(f"brought snapshot {name[:SHORT]}")
