"""Which run a command means: the one that --resume names, the one of the output directory, or a new one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout.cli.asking import reached
from rollout.cli.input_check import InputCheck
from rollout.cli.references import means, resolve_run
from rollout.cli.work_options import Options
from rollout.client.private import state_of
from rollout.client.target import Target
from rollout.model.errors import ConfigError, OtherRunError
from rollout.model.ids import is_ulid, short
from rollout.workloads.carrying import CARRIED
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Checked, Workload
from rollout.workloads.resume import all_changes, failed_without_results


class MeantRun:
    """`find` it. `note` hears what a person should know. `special`: the command does more than to go on with a run."""

    def __init__(
        self,
        workload: Workload[Any, Any],
        options: Options,
        target: Target,
        output: OutputDirectory,
        check: InputCheck,
        note: Callable[[str], None],
        *,
        special: bool,
        patience_s: float,
    ) -> None:
        self._workload = workload
        self._options = options
        self._target = target
        self._output = output
        self._check = check
        self._note = note
        self._special = special
        self._patience_s = patience_s

    async def find(self) -> tuple[str | None, Checked]:
        """Its id, None for a new one, and its input, which is to be closed. A run that failed without results makes
        way for a new one where it was made with something else. ConfigError, InputError."""
        known = self._output.check(await self._resumed())
        by_directory = known if self._options.resume is None else None
        without_results = by_directory is not None and failed_without_results(
            self._workload, self._output, by_directory
        )
        try:
            checked = await self._check.checked(resumed=known is not None, without_results=without_results)
            if without_results:
                self._refuse_changes(checked)
        except OtherRunError as error:
            if by_directory is None:
                raise
            ended = f"run {short(by_directory)} failed before any of the {self._workload.unit} had a result"
            self._note(f"note: {ended}, and {error.message}: this is another run")
            self._output.leave()
            return None, await self._check.checked(resumed=True)  # its input may be at hand in a copy only
        return known, checked

    async def _resumed(self) -> str | None:
        """The id of the run that --resume names; what is not all of one, the directory or the cluster knows."""
        text = self._options.resume
        if text is None or is_ulid(text.upper()):
            return text and text.upper()
        own = self._output.run_id
        if text and own is not None and means(own, text):
            return own
        if self._target.private is not None and state_of(self._output.path) is None:
            raise ConfigError(
                f"--resume {text}: no private cluster has run in {self._output.path} that knows such a run: name the "
                "cluster of the run (--coordinator, --context), or give the whole id"
            )
        async with reached(self._target, self._note, patience_s=self._patience_s) as (runs, _):
            return await resolve_run(runs, text)

    def _refuse_changes(self, checked: Checked) -> None:
        """OtherRunError: the run was made with something else, and makes way."""
        stored = self._output.stored_config
        if not self._workload.makes_way or stored is None or stored.get(CARRIED) or self._special:
            return
        if changes := all_changes(self._workload, stored, checked.config):
            checked.close()
            raise OtherRunError(f"what it was made with has changed since ({changes})", changes=changes)
