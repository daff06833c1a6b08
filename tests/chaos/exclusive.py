"""A run of `exclusive` rows that goes on beside the batches, and what must be true of it: no two attempts at once.

Each attempt holds a lock while its process lives, and writes down when it finds that taken. A worker that is stopped as
a whole, as a machine is, holds its locks until it goes on and does nothing meanwhile; nothing else may find one taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import netns_client
from netns_client import Effect, read_effects

from chaos.faults.worker import FROZEN
from chaos.report import Struck
from chaos.world import MARK, World

AHEAD = 4  # fewer than there are slots: what is taken from one worker begins at another at once
ROW_MS = 15_000
"""Longer than a failure timeout: otherwise one that nobody ended would be over before its row begins elsewhere."""
THAW_S = 2.0
"""From SIGCONT of a whole worker until what must not go on has been killed, on a busy machine."""


class Exclusive:
    """`start`, then `finish` when the last fault is over."""

    name = "exclusive"

    def __init__(self, world: World) -> None:
        self._world = world
        self._directory = world.root / self.name
        self._process: asyncio.subprocess.Process | None = None

    @property
    def _stop(self) -> Path:
        return self._directory / "stop"

    @property
    def _rows(self) -> Path:
        return self._directory / "rows.jsonl"

    @property
    def _effects(self) -> Path:
        return self._directory / "effects"

    async def start(self) -> None:
        self._effects.mkdir(parents=True)
        files = ["--stop", str(self._stop), "--rows", str(self._rows), "--effects", str(self._effects)]
        numbers = ["--ahead", str(AHEAD), "--exclusive-every", "1", "--exclusive-ms", str(ROW_MS)]
        with (self._directory / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._world.behind, sys.executable, netns_client.__file__, *self._world.operator, *files, *numbers,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {MARK: self._world.mark},
            )  # fmt: skip
        self._world.clients[self.name] = self._process.pid

    def check(self) -> None:
        """Raises where it has ended before it was told to."""
        if self._process is not None and self._process.returncode is not None and not self._stop.exists():
            raise RuntimeError(f"the client of the exclusive rows gave up: {self._said()[-600:]}")

    async def finish(self, patience_s: float) -> None:
        assert self._process is not None, "start() first"
        self._stop.touch()
        try:
            code = await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self._world.object_to(f"the run of exclusive rows did not end {patience_s:.0f} s after the last fault")
            return
        if code != 0:
            self._world.object_to(f"the client of the exclusive rows ended with {code}: {self._said()[-600:]}")

    def _said(self) -> str:
        return (self._directory / "log").read_text(errors="replace")

    def judge(self, faults: list[Struck]) -> list[str]:
        """Objections."""
        rows = [json.loads(line) for line in self._rows.read_text().splitlines()]
        submitted = next((json.loads(x)["submitted"] for x in self._said().splitlines() if '"client_done"' in x), -1)
        found: list[str] = []
        if [row["seq"] for row in rows] != list(range(submitted)):
            found.append(f"exclusive rows: {len(rows)} were told of, {submitted} submitted; each once and in order")
        found += [f"exclusive row {r['seq']} has the result {r['data']!r}" for r in rows if r["data"] != str(r["seq"])]
        return found + overlaps(read_effects(self._effects), faults, time.time() - time.monotonic())

    def totals(self) -> dict[str, int]:
        effects = read_effects(self._effects)
        count = {what: sum(e.what == what for e in effects) for what in ("start", "end", "cancelled", "beside")}
        return {
            "exclusive_attempts": count["start"],
            "exclusive_killed": count["start"] - count["end"] - count["cancelled"],
            "exclusive_beside_frozen": count["beside"],
        }


def overlaps(effects: list[Effect], faults: list[Struck], epoch: float) -> list[str]:
    """Attempts that began beside another of which no worker that stood still as a whole can be the reason."""
    frozen = [(f.at, f.at + f.held_s + THAW_S) for f in faults if f.effect == FROZEN]
    beside = [e for e in effects if e.what == "beside"]
    return [
        f"attempt {e.attempt} of exclusive row {e.row} began while another of it still ran"
        for e in beside
        if not any(since <= e.at + epoch <= until for since, until in frozen)
    ]
