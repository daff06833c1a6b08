"""What the commands of a phase print: to files of bounded size, and line by line to whoever follows the run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from rollout_worker.sandboxes.port import Stream
from rollout_worker.trials.masking import Masks

HEAD_BYTES = 4 << 20
TAIL_BYTES = 1 << 20
"""Of each stream of a phase its file keeps so much of the beginning and of the end."""
LINE_MAX = 2000
LINES_A_SECOND = 25
BURST_LINES = 100
"""Of one trial at once, live: others share the same way out."""
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class BoundedFile:
    """The beginning and the end of what is written. `size`: bytes that were."""

    def __init__(self, path: Path, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._file = path.open("ab")
        self._room = max(0, head - self._file.tell())
        self._keep = tail
        self._tail = bytearray()
        self._cut = 0
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self._file.write(data[: self._room])
        rest = data[self._room :]
        self._room -= len(data) - len(rest)
        self._tail += rest
        if len(self._tail) > 2 * self._keep:
            self._trim()

    def _trim(self) -> None:
        more = max(0, len(self._tail) - self._keep)
        self._cut += more
        del self._tail[:more]

    def close(self) -> None:
        self._trim()
        if self._cut:
            self._file.write(f"\n[... {self._cut} bytes left out ...]\n".encode())
        self._file.write(self._tail)
        self._file.close()


class Live:
    """Lines of one trial for whoever follows it, with whose they are before each; as many as others leave room for."""

    def __init__(self, label: str, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`show` gets a line without its end."""
        self._label = label
        self._show = show
        self._clock = clock
        self._room = float(BURST_LINES)
        self._at = clock()
        self._dropped = 0

    def line(self, phase: str, text: str) -> None:
        now = self._clock()
        self._room = min(BURST_LINES, self._room + (now - self._at) * LINES_A_SECOND)
        self._at = now
        if self._room < 1:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._show(f"[{self._label} {phase}] ... {dropped} lines are not shown here; the trial's files have them")
        self._room -= 1
        self._show(f"[{self._label} {phase}] {text}")


class Streams:
    """Both streams of one phase. `directory` gets stdout.txt and stderr.txt."""

    def __init__(self, directory: Path, phase: str, live: Live, masks: Masks) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        names: tuple[Stream, Stream] = ("stdout", "stderr")
        self._names = names
        self._files = {name: BoundedFile(directory / f"{name}.txt") for name in names}
        self._masked = {name: masks.stream() for name in names}
        self._lines = {name: _Lines(lambda text: live.line(phase, text)) for name in names}

    def feed(self, stream: Stream, data: bytes) -> None:
        self._pass_on(stream, self._masked[stream].feed(data))

    def say(self, text: str) -> None:
        """A line of our own."""
        self.feed("stderr", f"{text}\n".encode())

    def _pass_on(self, stream: Stream, data: bytes) -> None:
        self._files[stream].write(data)
        self._lines[stream].feed(data)

    def close(self) -> None:
        for stream in self._names:
            self._pass_on(stream, self._masked[stream].close())
            self._lines[stream].close()
            self._files[stream].close()


class _Lines:
    """Bytes as lines of text that a terminal shows as such: no control characters, and not too long."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line = line
        self._part = bytearray()

    def feed(self, data: bytes) -> None:
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._add(piece)
            self.close()
        self._add(rest)

    def _add(self, piece: bytes) -> None:
        self._part += piece[: max(0, 4 * LINE_MAX - len(self._part))]

    def close(self) -> None:
        text = bytes(self._part).decode(errors="replace").rstrip("\r ")
        self._part.clear()
        text = _UNPRINTABLE.sub("", text[text.rfind("\r") + 1 :])
        if text:
            self._line(text if len(text) <= LINE_MAX else text[:LINE_MAX] + " (cut)")
