"""Chooses the run that a command means: the one that --resume names, the one of the output directory, or a new one."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.cli.asking import reached
from rollout.cli.input_check import InputCheck
from rollout.cli.references import means, resolve_run
from rollout.cli.work import FIRST_PATIENCE_S, Work
from rollout.client.private import state_of
from rollout.model.errors import ConfigError, OtherRunError
from rollout.model.ids import is_ulid, short
from rollout.workloads.carrying import CARRIED
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Checked
from rollout.workloads.resume import all_changes, failed_without_results


@dataclass(frozen=True, slots=True)
class MeantRun:
    """The run that `work` means, while `output` is locked."""

    work: Work
    output: OutputDirectory

    async def find(self) -> tuple[str | None, Checked]:
        """Return the run's id, or None for a new one, and its input, which the caller closes.

        A run that failed without results makes way for a new one if its configuration changed. Raises ConfigError and
        InputError.
        """
        workload, output, check = self.work.workload, self.output, InputCheck(self.work, self.output)
        known = output.check(await self._resumed())
        by_directory = known if self.work.options.resume is None else None
        without_results = by_directory is not None and failed_without_results(workload, output, by_directory)
        try:
            checked = await check.checked(resumed=known is not None, without_results=without_results)
            if without_results:
                self._refuse_changes(checked)
        except OtherRunError as error:
            if by_directory is None:
                raise
            ended = f"run {short(by_directory)} failed before any of the {workload.unit} had a result"
            self.work.display.note(f"note: {ended}, and {error.message}: this is another run")
            output.leave()
            return None, await check.checked(resumed=True)  # its input may be at hand in a copy only
        return known, checked

    async def _resumed(self) -> str | None:
        """Return the id of the run that --resume names; the directory or the cluster completes a partial id."""
        text, target, path = self.work.options.resume, self.work.target, self.output.path
        if text is None or is_ulid(text.upper()):
            return text and text.upper()
        own = self.output.run_id
        if text and own is not None and means(own, text):
            return own
        if self.work.is_private and state_of(path) is None:
            raise ConfigError(
                f"--resume {text}: no private cluster has run in {path} that knows such a run: name the "
                "cluster of the run (--coordinator, --context), or give the whole id"
            )
        async with reached(target, self.work.display.note, patience_s=FIRST_PATIENCE_S) as (runs, _):
            return await resolve_run(runs, text)

    def _refuse_changes(self, checked: Checked) -> None:
        """Raise OtherRunError if the run was made with another configuration and makes way."""
        workload, stored = self.work.workload, self.output.stored_config
        special = self.work.options.retry is not None or self.work.followed is not None
        if not workload.makes_way or stored is None or stored.get(CARRIED) or special:
            return
        if changes := all_changes(workload, stored, checked.config):
            checked.close()
            raise OtherRunError(f"what it was made with has changed since ({changes})", changes=changes)
