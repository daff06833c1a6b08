"""Log lines for a terminal: `12:03:44  warning: worker 9ZK4FA7Q on gpu-3 is lost: silent for 6.2 s ...`.

Times are local, each day begins with a line, events are sentences, ids are short. A lasting condition is reported once,
and then now and then: `still, for 20 s (12 times): ...`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from structlog.types import EventDict

from rollout.config.pace import Pace
from rollout.config.sentences import (
    MARKED,
    SENTENCES,
    VERBATIM,
    Sentence,
    duration,
    marked,
    sentence_of,
    shortened,
)
from rollout.config.visible import visible

_STYLES = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[1;31m"}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal:
    """Last processor of structlog: returns a line, or nothing (the caller raises `structlog.DropEvent`)."""

    def __init__(
        self, *, colors: bool, clock: Callable[[], float] = time.monotonic, local: Callable[[], datetime] | None = None
    ) -> None:
        self._colors = colors
        self._pace = Pace(clock)
        self._local = local or (lambda: datetime.now().astimezone())
        self._day: date | None = None

    def __call__(self, _logger: Any, method: str, event_dict: EventDict) -> str | None:
        """Return the line, or None if there is nothing to say now."""
        fields = dict(event_dict)
        event = str(fields.pop("event", ""))
        level = str(fields.pop("level", method))
        fields.pop("timestamp", None)
        details = [str(fields.pop(key)) for key in ("exception", "stack") if fields.get(key)]
        sentence = SENTENCES.get(event)
        if event in VERBATIM:  # of a progress bar, what it came to
            fields |= {
                key: str(fields[key]).rstrip("\r").rpartition("\r")[2] for key in ("text", "line") if key in fields
            }
        said = sentence_of(event, fields)
        if said is None:
            said = _foreign(event, fields)
        if not said:
            for over in sentence.ends if sentence else ():
                self._pace.end(f"{over} ")
            return None
        said = self._paced(event, sentence, said, fields, level)
        if said is None:
            return None
        return "\n".join([self._line(said, level), *map(visible, details)])

    def _paced(
        self, event: str, sentence: Sentence | None, said: str, fields: dict[str, Any], level: str
    ) -> str | None:
        lasted = [self._pace.end(f"{over} ") for over in sentence.ends] if sentence else []
        if longest := max((seconds for seconds in lasted if seconds is not None), default=None):
            said = f"{said}, after {duration(longest)}"
        key = _key(event, sentence, said, fields, level)
        if key is None:
            return said
        told = self._pace.tell(key)
        if told is None:
            return None
        seconds, times = told
        return said if times == 1 else f"still, for {duration(seconds)} ({times} times): {said}"

    def _line(self, said: str, level: str) -> str:
        now = self._local()
        at, said = f"{now:%H:%M:%S}", visible(marked(said, level))
        day = self._begun(now)
        if not self._colors:
            return f"{day}{at}  {said}"
        style = _STYLES.get(level, "")
        return f"{day}{_DIM}{at}{_PLAIN}  {style}{said}{_PLAIN if style else ''}"

    def _begun(self, now: datetime) -> str:
        """Return a line with the date if a new day has begun."""
        if now.date() == self._day:
            return ""
        self._day = now.date()
        return f"{now:%A %Y-%m-%d}{f', times are {now:%Z}' if now.tzinfo else ''}\n"


def _key(event: str, sentence: Sentence | None, said: str, fields: dict[str, Any], level: str) -> str | None:
    """Return the key of the condition, or None if each event is reported."""
    if sentence is not None and sentence.about is not None:
        about = " ".join(str(fields.get(name, "")) for name in sentence.about)
        return f"{event} {about or _place(fields)}"
    if event in VERBATIM or sentence is None or level in MARKED:
        return f"{event} {said}"
    return None


def _place(fields: dict[str, Any]) -> str:
    """Return the place of the condition, if several places may have it."""
    return " ".join(str(fields[name]) for name in ("child", "plugin", "run_id") if name in fields)


def _foreign(event: str, fields: dict[str, Any]) -> str:
    """Return the line of a library, or of an event without a sentence."""
    logger = fields.pop("logger", None)
    child = fields.pop("child", None)
    fields.pop("pid", None)
    fields.pop("worker", None)
    values = "".join(f", {key}={value}" for key, value in fields.items() if value not in (None, ""))
    who = [f"process {child}"] if child is not None else []
    who += [str(logger)] if logger else []
    text = event if logger or " " in event else event.replace("_", " ")
    return shortened(": ".join([*who, f"{text}{values}"]))
