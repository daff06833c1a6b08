"""Output of a child process as lines of the daemon's log: as much as a log can take, and a count of the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol, cast

from rollout.config.sentences import sentence_of

from rollout_worker.attempts import AttemptKey
from rollout_worker.bounded_lines import BoundedLines

BYTES_A_SECOND = 64 << 10
LINES_A_SECOND = 200
BURST_S = 5.0
"""Seconds' worth of lines at once: a traceback, or what a library prints while it loads."""
_NAME = re.compile(rb"([0-9]{1,18})\.([0-9]{1,18})\.([0-9]{1,9})")
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical"})
_LOGGERS_OWN = frozenset({"self", "method_name", "event", "timestamp", "child", "pid", "exc_info", "stack_info"})

Emit = Callable[[str, str, dict[str, Any]], None]
"""Function called with (level, event, fields)."""
Printed = Callable[[str, str, AttemptKey | None], None]
"""Function called with (stream, line, the attempt that printed it, if known)."""
Missing = Callable[[int, int, int], None]
"""Function called with (log of the items that printed it or 0, lines, bytes)."""


class Shipper(Protocol):
    """Sends output to the run that it belongs to."""

    def add(self, run_id: str, executor: str, stream: str, text: str, key: AttemptKey | None) -> None: ...
    def left_out(self, run_id: str, executor: str, lines: int, size: int) -> None: ...


class Output(BoundedLines):
    """Both streams of one process. JSON lines with an `event` keep their level and fields."""

    def __init__(
        self,
        emit: Emit,
        now: float,
        printed: Printed = lambda stream, line, key: None,
        missing: Missing = lambda log, lines, size: None,
    ) -> None:
        super().__init__(now, bytes_a_second=BYTES_A_SECOND, lines_a_second=LINES_A_SECOND, burst_s=BURST_S)
        self._emit = emit
        self._printed = printed
        self._missing = missing

    def shown(self, stream: str, text: str, name: bytes) -> None:
        key = _key(name)
        if text.startswith("{"):
            try:
                entry: Any = json.loads(text)
                event, level = str(entry.pop("event")), str(entry.pop("level", "info"))
            except (ValueError, KeyError, RecursionError):
                pass
            else:
                # Not `child` and `pid`, which are of this one, nor what means something to the logger itself.
                fields = {k: v for k, v in cast("dict[str, Any]", entry).items() if k not in _LOGGERS_OWN}
                self._emit(level if level in _LEVELS else "info", event, fields)
                said = sentence_of(event, fields) or " ".join([event, *map(_pair, fields.items())])
                self._printed(stream, said, key)
                return
        self._printed(stream, text, key)
        self._emit("info", "child_output", {"text": text})

    def dropped(self, taken: list[tuple[int, int, int]]) -> None:
        fields = {"lines": sum(lines for _, lines, _ in taken), "bytes": sum(size for *_, size in taken)}
        self._emit("warning", "child_output_dropped", fields)
        for log, lines, size in taken:
            self._missing(log, lines, size)


def _key(name: bytes) -> AttemptKey | None:
    found = _NAME.fullmatch(name)
    return AttemptKey(*map(int, found.groups())) if found is not None else None


def _pair(field: tuple[str, Any]) -> str:
    return f"{field[0]}={field[1]}"
