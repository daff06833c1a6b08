"""Writes the output of a phase's commands to files of bounded size, and shows it line by line to those who follow the
run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rollout_worker.sandboxes.port import Stream
from rollout_worker.trials.masking import Masks

HEAD_BYTES = 4 << 20
TAIL_BYTES = 1 << 20
"""The file of each stream of a phase keeps this much of the beginning and of the end."""
LINE_MAX = 2000
LINES_A_SECOND, BURST_LINES = 100, 800
"""Limits of live lines for all trials of a process, which share its output: per second, and at once after a silence."""
AGAIN = 0.2
"""After too many lines, showing resumes when this share of a burst is available."""
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class BoundedFile:
    """Keeps the beginning and the end of what is written. `lost` says why some of it could not be written, or is
    empty."""

    def __init__(self, path: Path, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._file = path.open("ab", buffering=0)
        self._room = max(0, head - self._file.tell())
        self._keep = tail
        self._tail = bytearray()
        self._cut = 0
        self.lost = ""

    def write(self, data: bytes) -> None:
        self._put(data[: self._room])
        rest = data[self._room :]
        self._room -= len(data) - len(rest)
        self._tail += rest
        if len(self._tail) > 2 * self._keep:
            self._trim()

    def _put(self, data: bytes) -> None:
        """Write data, hiding a full disk of the worker from the program that prints."""
        if data and not self.lost:
            try:
                self._file.write(data)
            except OSError as error:
                self.lost = error.strerror or str(error)

    def _trim(self) -> None:
        more = max(0, len(self._tail) - self._keep)
        self._cut += more
        del self._tail[:more]

    def close(self) -> None:
        self._trim()
        if self._cut:
            self._put(f"\n[... {self._cut} bytes left out ...]\n".encode())
        self._put(bytes(self._tail))
        with suppress(OSError):
            self._file.close()


class Live:
    """Shows lines of a trial live, each with its label, as many as other trials leave room for."""

    def __init__(
        self, label: str, show: Callable[[str], None], trials: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`show` gets a line without its end. `trials` is the number that share the limit."""
        self._label = label
        self._show = show
        self._clock = clock
        self._rate, self._burst = LINES_A_SECOND / trials, max(10.0, BURST_LINES / trials)
        self._room = self._burst
        self._at = clock()
        self._dropped = 0

    def room(self) -> int:
        """Return the number of lines that may be shown now."""
        now = self._clock()
        self._room = min(self._burst, self._room + (now - self._at) * self._rate)
        self._at = now
        if self._dropped and self._room < AGAIN * self._burst:
            return 0
        return int(self._room)

    def line(self, phase: str, text: str) -> None:
        """Show a line; call it only if there is room."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._show(f"[{self._label} {phase}] ... {dropped} lines are not shown")
        self._room -= 1
        self._show(f"[{self._label} {phase}] {text}")

    def drop(self, lines: int) -> None:
        """Count lines that are not shown."""
        self._dropped += lines


class Streams:
    """Both streams of a phase, written to stdout.txt and stderr.txt in `directory`."""

    def __init__(self, directory: Path, phase: str, live: Live, masks: Masks) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        names: tuple[Stream, Stream] = ("stdout", "stderr")
        self._names = names
        self._files = {name: BoundedFile(directory / f"{name}.txt") for name in names}
        self._masked = {name: masks.stream() for name in names}
        self._lines = {name: _Lines(live, phase) for name in names}

    def feed(self, stream: Stream, data: bytes) -> None:
        self._pass_on(stream, self._masked[stream].feed(data))

    def say(self, text: str) -> None:
        """Write a line of our own."""
        self.feed("stderr", f"{text}\n".encode())

    def _pass_on(self, stream: Stream, data: bytes) -> None:
        self._files[stream].write(data)
        self._lines[stream].feed(data)

    def close(self) -> list[str]:
        """Close the files and return remarks."""
        for stream in self._names:
            self._pass_on(stream, self._masked[stream].close())
            self._lines[stream].close()
            self._files[stream].close()
        return [f"{stream} was not kept whole: {file.lost}" for stream, file in self._files.items() if file.lost]


class _Lines:
    """Splits bytes into lines that are safe for a terminal: without control characters, and not too long.

    Lines without room are not even decoded: a print of a gigabyte must not slow down others.
    """

    def __init__(self, live: Live, phase: str) -> None:
        self._live = live
        self._phase = phase
        self._part = bytearray()
        self._skipping = False  # in the middle of a line that is not shown

    def feed(self, data: bytes) -> None:
        room = self._live.room()
        if room < 1:
            self._skip(data)
            return
        if self._skipping:
            _, end, data = data.partition(b"\n")
            self._skipping = not end
        *ended, rest = data.split(b"\n", room)
        for piece in ended:
            self._add(piece)
            self.close()
        if len(ended) < room:
            self._add(rest)
        else:
            self._skip(rest)

    def _skip(self, data: bytes) -> None:
        if data:
            self._part.clear()
            self._live.drop(data.count(b"\n"))
            self._skipping = not data.endswith(b"\n")

    def _add(self, piece: bytes) -> None:
        self._part += piece[: max(0, 4 * LINE_MAX - len(self._part))]

    def close(self) -> None:
        text = bytes(self._part).decode(errors="replace").rstrip("\r ")
        self._part.clear()
        text = _UNPRINTABLE.sub("", text[text.rfind("\r") + 1 :])
        if text:
            self._live.line(self._phase, text if len(text) <= LINE_MAX else text[:LINE_MAX] + " (cut)")
