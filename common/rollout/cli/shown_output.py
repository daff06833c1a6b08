"""`--show-output`: prints what the processes of a run print, as it comes, beside its progress."""

from __future__ import annotations

import asyncio

from rollout.cli.printed import Reader, left_out_text, printed
from rollout.cli.progress import Display
from rollout.client.beside import Beside
from rollout.client.runs import Runs

LAST_LINES_S = 10.0
"""Seconds to wait for the last lines, which come a moment after the results."""


class ShownOutput(Beside):
    def __init__(self, runs: Runs, run_id: str, display: Display) -> None:
        self._runs = runs
        self._run_id = run_id
        self._display = display
        self._reader = Reader()

    async def skip(self) -> None:
        """Skip what was printed before this command."""
        end = False
        while not end:
            reply = await self._runs.output(self._run_id, self._reader.position)
            end = reply.end
            for chunk in reply.chunks:
                self._reader.lines(chunk, reply.root_log)

    async def _run(self) -> None:
        async for line in printed(self._runs, self._run_id, self._reader, follow=True):
            row = f"row {line.row}: " if line.row is not None else ""
            text = left_out_text(line) or line.text
            self._display.event("output", f"{row}{text}", row=line.row, stream=line.stream, text=text)

    async def finish(self, count: int) -> None:
        await asyncio.wait([self.job], timeout=LAST_LINES_S)
