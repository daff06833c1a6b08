"""Check of a command's input in a thread, with progress, and open to Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from rollout.cli.words import counted
from rollout.cli.work import Work
from rollout.model.errors import InputError
from rollout.workloads.following import FOLLOWED, Parts
from rollout.workloads.json_form import lookup
from rollout.workloads.output import OutputDirectory
from rollout.workloads.port import Checked, InputReader, cloud_of

_TELL_EVERY_S = 2.0


def slowly(step: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that a thread may call with its progress; it throttles `step`, and skips the first moment."""
    loop = asyncio.get_running_loop()
    told = loop.time()

    def tell(text: str) -> None:
        nonlocal told
        if text and loop.time() - told > _TELL_EVERY_S:
            told = loop.time()
            loop.call_soon_threadsafe(step, text)

    return tell


@dataclass(frozen=True, slots=True)
class InputCheck:
    """Check of the input of `work`, whose run belongs to `output`."""

    work: Work
    output: OutputDirectory

    async def checked(self, *, resumed: bool, without_results: bool = False) -> Checked:
        """Check the input. Raises ConfigError or InputError with every fault, OtherRunError, NoRowsYetError."""
        work, output = self.work, self.output
        stopped, say = threading.Event(), slowly(work.display.step)

        def tell(text: str) -> None:
            if stopped.is_set():
                raise InputError("interrupted")
            say(text)

        reading = InputReader(
            exclude=output.path,
            written=work.workload.result_files,
            spool=output.spool_path,
            resumed=resumed,
            without_results=without_results,
            index=output.index_path,
            kept=output.kept,
            cloud=cloud_of(work.settings),
            own=work.workload.bucket(work.settings),
            parts=self._parts(),
            progress=lambda rows, size: tell(f"checking the input: {counted(rows, 'row')}, {size >> 20} MiB"),
            tell=tell,
        )
        checking = asyncio.ensure_future(asyncio.to_thread(work.workload.check, work.settings, reading))
        try:
            return await asyncio.shield(checking)
        except asyncio.CancelledError:
            stopped.set()  # or the thread would read on to the end of the input
            await asyncio.wait([checking])
            if checking.exception() is None:
                checking.result().close()
            raise

    def _parts(self) -> Parts | None:
        """Return the parts of the run's input if it is followed or was."""
        stored = self.output.stored_config
        if stored is None or not (self.work.followed or lookup(stored, f"input.{FOLLOWED}")):
            return None
        return Parts.of(stored, grows=self.work.options.retry is None)
