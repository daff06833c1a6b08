"""Resumes a run of the cluster, and refuses a configuration that it cannot resume with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from rollout.cli.command_cluster import CommandCluster
from rollout.cli.run_place import why_gone
from rollout.cli.work import Work
from rollout.client.runs import Runs
from rollout.client.snapshots import keep_names
from rollout.model.errors import ConfigError, NotFoundError
from rollout.workloads.carrying import CARRIED, Carried
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Checked
from rollout.workloads.resume import (
    changed_limits,
    collected,
    compare,
    open_collector,
    resumed_config,
    with_limits,
)


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """The run `run_id` of `work`, in `output`.

    `stored` is its configuration, as far as the directory has it. `note` does not repeat itself.
    """

    work: Work
    output: OutputDirectory
    cluster: CommandCluster
    note: Callable[[str], None]
    run_id: str
    stored: JsonObject | None

    async def agree(self, runs: Runs, checked: Checked) -> tuple[JsonObject, str] | None:
        """Return the run's configuration, with permitted changes, and its name.

        Returns None if the cluster does not know the run and nothing is lost. Raises ConfigError if something changed
        that must not.
        """
        workload, named = self.work.workload, self.work.options.name
        try:
            status = await runs.get(self.run_id)
        except NotFoundError:
            await self.refuse_to_lose(checked)
            return None
        if named not in ("", status.spec.name):
            self.work.display.note(f"note: the run keeps its name, {status.spec.name!r}")
        ledger: JsonObject = json.loads(status.spec.config)
        await carry(self.output, ledger, checked)
        if self.stored is None:
            keep_names(ledger, checked.config, checked.snapshots)
            workload.finalize(checked)
        free = {key: value for key, value in checked.config.items() if key in workload.free}
        for kept in await asyncio.to_thread(compare, workload, self.output, ledger | free, checked):
            self.note(f"note: {kept}")
        config = resumed_config(workload, ledger, checked.config)
        if status.state != "completed":
            config = await self._follow_limits(runs, config, checked)
        return config, status.spec.name

    async def _follow_limits(self, runs: Runs, config: JsonObject, checked: Checked) -> JsonObject:
        """Return the configuration with this command's limits, which apply to units without a result."""
        workload = self.work.workload
        changed = changed_limits(workload, config, checked.config)
        if not changed:
            return config
        config = with_limits(config, changed)
        await runs.set_limits(self.run_id, workload.spec(self.run_id, config).config, workload.limits(config))
        for key, (was, now) in changed.items():
            said = f"{workload.changeable[key]}: {json.dumps(was)} -> {json.dumps(now)}"
            self.work.display.note(f"note: {said}, for {workload.unit} that have no result")
        return config

    async def refuse_to_lose(self, checked: Checked) -> None:
        """Raise ConfigError if the directory may hold results of a run that its cluster does not know."""
        workload, output = self.work.workload, self.output
        if self.stored is not None and not collected(workload, output):
            return
        collector = await asyncio.to_thread(
            open_collector, workload, output, self.run_id, checked.config, checked.total
        )
        collector.close()
        raise ConfigError(
            f"{why_gone(output.path, self.run_id, self.cluster)}\nTo start a new run, name another output directory"
            + "".join(f"\n{fault}: only the ledger has what is missing" for fault in collector.faults)
        )


async def carry(output: OutputDirectory, config: JsonObject, checked: Checked) -> None:
    """Restrict the input to rows that the run with `config` does not carry over. Raises StateError if what it carries
    is missing."""
    if config.get(CARRIED) and checked.carried is None:
        checked.carry(await asyncio.to_thread(Carried.read, output.path, config[CARRIED]))
