"""Progress of a run: a live line on a terminal, plain lines in a log, JSON lines for programs."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from rollout.cli import show
from rollout.cli.show import print_json
from rollout.cli.words import counted, duration, of_unit, unsuccessful
from rollout.config.visible import visible
from rollout.workloads.port import StatusTable

_WINDOW_S = 30.0
_PLAIN_EVERY_S = 5.0
_BAR_MIN = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Status of a run at one moment, counted by its ledger in `unit`s.

    Rates cover the last half minute. `measure` is what else is counted, such as tokens.
    """

    total: int
    submitted: int
    done: int
    failed: int
    committed: int
    running: int
    workers: int
    per_s: float = 0.0
    measure_per_s: float = 0.0
    eta_s: float | None = None
    unit: str = "rows"
    measure: str = ""
    state: str = "running"
    """State of the run, or `pausing`."""
    invalid: int = 0
    """Number of `failed` rows that cannot be used."""
    note: str = ""
    """Progress text of the running attempt; `figures` has the same for programs, whose `step` and `steps` drive the
    bar."""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    board: StatusTable | None = None
    """Table that the workload shows; it then includes the texts of single attempts."""
    waits: str = ""
    """Reason why units wait if no worker has any."""
    intake: str = ""
    """State of the intake, for a run whose rows come from a queue; `total` is then the number so far."""
    waiting: int | None = None
    """Number of messages in that queue, or None if not known."""

    @property
    def extent(self) -> tuple[str, int, int]:
        """(what is counted, number done, total number)."""
        if self.board is not None and self.board.extent is not None:
            return self.board.extent
        step, steps = self.figures.get("step"), self.figures.get("steps")
        if self.board is None and isinstance(step, int) and isinstance(steps, int) and 0 <= step <= steps and steps > 0:
            return "steps", step, steps
        return self.unit, self.done + self.failed, self.total

    @property
    def counted(self) -> str:
        """Unit of the rate."""
        return self.board.extent[0] if self.board is not None and self.board.extent is not None else self.unit

    def fields(self) -> dict[str, Any]:
        """Return the fields for programs."""
        measured = {f"{self.measure}_per_s": self.measure_per_s} if self.measure else {}
        return {
            self.unit: self.total,
            "submitted": self.submitted,
            "done": self.done,
            "failed": self.failed,
            "invalid": self.invalid,
            "committed": self.committed,
            "running": self.running,
            "workers": self.workers,
            f"{self.counted}_per_s": self.per_s,
            **measured,
            "eta_s": self.eta_s,
            "state": self.state,
            **({"intake": self.intake, "waiting": self.waiting} if self.intake else {}),
            **({"note": self.note} if self.note else {}),
            **(self.figures if self.board is None else self.board.fields),
        }


class Rates:
    """Rates over a sliding window, from counts that only grow."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int]] = deque()

    def add(self, units: int, measured: int, now: float | None = None) -> tuple[float, float]:
        """Add counts and return both rates per second."""
        at = time.monotonic() if now is None else now
        self._points.append((at, units, measured))
        while len(self._points) > 2 and at - self._points[0][0] > _WINDOW_S:
            self._points.popleft()
        first = self._points[0]
        seconds = at - first[0]
        if seconds <= 0:
            return 0.0, 0.0
        return (units - first[1]) / seconds, (measured - first[2]) / seconds


class Display(ABC):
    """Display of a run. Calls may come in any order; `close` is called in any case."""

    @abstractmethod
    def note(self, message: str) -> None:
        """Print a message on its own line."""

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        """Report a turning point: `fields` for programs, `message` for people unless it is empty."""
        if message:
            self.note(message)

    @abstractmethod
    def progress(self, snapshot: Snapshot) -> None: ...

    _stage = ""
    _told = 0.0

    def step(self, message: str) -> None:
        """Show progress of something long as `what: how far`; the next call replaces it. A log gets it now and then."""
        stage, now = message.partition(":")[0], time.monotonic()
        if stage != self._stage or now - self._told >= _PLAIN_EVERY_S:
            self._stage, self._told = stage, now
            self.note(message)

    def close(self) -> None:
        """Leave the terminal as it was."""
        return


class NotesOnly(Display):
    """Display for a part of another command: prints only notes."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._say = tell

    def note(self, message: str) -> None:
        self._say(message)

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        return

    def progress(self, snapshot: Snapshot) -> None:
        return


class JsonDisplay(Display):
    def note(self, message: str) -> None:
        print_json({"event": "note", "message": message})

    def event(self, name: str, message: str, /, **fields: Any) -> None:
        print_json({"event": name, **fields})

    def progress(self, snapshot: Snapshot) -> None:
        print_json({"event": "progress", **snapshot.fields()})


class PlainDisplay(Display):
    """Display that prints a line every few seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = 0.0
        self._line = ""

    def note(self, message: str) -> None:
        self._out.write(visible(message) + "\n")
        self._out.flush()

    def progress(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if now - self._last < _PLAIN_EVERY_S:
            return
        self._last = now
        unit, done, total = snapshot.extent
        if snapshot.intake:
            line = f"{done} of the {of_unit(total, unit)} that came, {details(snapshot)}"
            if line != self._line:  # a queue may be empty for days
                self.note(line)
            self._line = line
            return
        share = 100 * done / total if total else 0
        self.note(f"{done}/{of_unit(total, unit)} ({share:.1f} %), {details(snapshot)}")


class _Count(MofNCompleteColumn):
    """Count column that is never truncated, and empty if nothing is counted."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class TerminalDisplay(Display):
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or show.console()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            _Count(),
            TextColumn("{task.fields[details]}", markup=False),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=None, details="", visible=False)
        self._board: StatusTable | None = None
        self._live = Live(
            console=self._console, get_renderable=self._render, transient=True, redirect_stdout=False,
            redirect_stderr=False, refresh_per_second=4,
        )  # fmt: skip
        self._started = False

    def _render(self) -> RenderableType:
        if self._board is None:
            return self._progress
        tables = board_tables(self._board, self._console.height)
        return Group(self._progress, *tables) if self._board.extent is not None else Group(*tables, self._progress)

    def note(self, message: str) -> None:
        self._console.print(visible(message), markup=False, soft_wrap=True)

    def step(self, message: str) -> None:
        self._start()
        self._progress.update(self._task, description=message, total=None, details="", visible=True)

    def progress(self, snapshot: Snapshot) -> None:
        self._start()
        self._board = snapshot.board
        unit, done, total = snapshot.extent
        room = self._console.width - len(f"{unit}  {total}/{total}  ") - _BAR_MIN
        self._progress.update(
            self._task,
            description=unit,
            total=total,
            completed=done,
            details=details(snapshot, room),
            visible=True,
        )

    def close(self) -> None:
        if self._started:
            self._live.stop()
            self._started = False

    def _start(self) -> None:
        if not self._started:
            self._live.start(refresh=True)
            self._started = True


_LINES_BESIDES = 5
"""Lines that a board leaves free: its heads, its "more" line, the bar, and what the user has typed."""


def board_tables(board: StatusTable, height: int) -> Iterator[RenderableType]:
    """Yield as much of the board as fits a terminal of `height` lines."""
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(board.heads):
        table.add_column(head, justify="right" if number else "left", header_style="bold")
    room = max(1, height - _LINES_BESIDES)
    for row in board.rows[:room]:
        table.add_row(*map(visible, row))
    if board.heads:
        yield table
    room -= len(board.rows)
    shown = board.running[: max(0, room)]
    if shown:
        running = Table(box=None, show_header=False, pad_edge=False)
        for row in shown:
            running.add_row(*map(visible, row))
        yield running
    if more := board.n_running - len(shown):
        yield Text(f"and {more:,} more running" if shown else f"{more:,} running")
    if board.line:
        yield Text(board.line)


def details(snapshot: Snapshot, room: int | None = None) -> str:
    """Return all details, or the most important ones that fit `room` characters."""
    failed = unsuccessful(snapshot.failed, snapshot.invalid)
    if snapshot.state not in ("running", "pausing", "completed"):
        return f"{snapshot.state}, {failed}"  # nothing moves: no rate, no end, and nobody at it
    if snapshot.note and snapshot.board is None:
        return _noted(snapshot, failed if snapshot.failed else "", room)
    if snapshot.counted != snapshot.unit and not snapshot.failed:
        failed = ""
    rate = f"{snapshot.per_s:.1f} {snapshot.counted}/s"
    measured = f"{snapshot.measure_per_s:.0f} {snapshot.measure}/s" if snapshot.measure else ""
    eta = "" if snapshot.eta_s is None else f"ETA {duration(snapshot.eta_s)}"
    queue = _queue(snapshot) if snapshot.intake else ""
    state = f"pausing, {snapshot.running} still running" if snapshot.state == "pausing" else ""
    workers = "no workers" if not snapshot.workers else counted(snapshot.workers, "worker")
    if snapshot.intake and not snapshot.workers and snapshot.total <= snapshot.done + snapshot.failed:
        workers = ""  # nothing to do, so none is at it
    line = "" if snapshot.board is None or room is not None else snapshot.board.line
    waits = f"waits: {snapshot.waits}" if snapshot.waits and workers == "no workers" else ""
    parts = [part for part in (queue, state, rate, measured, eta, failed, workers, waits, line) if part]
    for least in (measured, waits, workers, rate, failed):
        if room is not None and len(", ".join(parts)) > room and least in parts:
            parts.remove(least)
    return ", ".join(parts)


def _queue(snapshot: Snapshot) -> str:
    left = snapshot.total - snapshot.done - snapshot.failed
    match snapshot.intake:
        case "draining":
            return f"draining: {left:,} being finished"
        case "ended":
            return f"{left:,} being finished"
        case "away":
            return "the queue cannot be reached"
        case _:
            known = "an unknown number" if snapshot.waiting is None else f"{snapshot.waiting:,}"
            return f"{known} waiting in the queue"


def _noted(snapshot: Snapshot, failed: str, room: int | None) -> str:
    """Return the attempt's own progress text, which says more than a rate of units."""
    workers = "" if snapshot.workers else "no workers"
    state = "pausing" if snapshot.state == "pausing" else ""
    _, done, total = snapshot.extent
    note = snapshot.note.removeprefix(f"step {done}/{total} · ")  # that stands before it
    text = ", ".join(part for part in (state, note, failed, workers) if part)
    return text if room is None or len(text) <= room else text[: max(0, room - 1)] + "…"


def eta(left: int, per_s: float, *, workers: int, state: str) -> float | None:
    """Return the seconds until nothing is left, or None if nobody works at it or has only begun."""
    if state != "running" or not workers or per_s <= 0:
        return None
    return round(left / per_s, 1)


def display_for(*, json: bool) -> Display:
    """Return the display that fits standard output."""
    if json:
        return JsonDisplay()
    return TerminalDisplay() if sys.stdout.isatty() else PlainDisplay(sys.stdout)
