"""Numbers and times for people: short, and in local time."""

from __future__ import annotations

import signal
from datetime import datetime

from rollout.config.sentences import shortened
from rollout.config.visible import visible
from rollout.model.counts import counted, of_unit

__all__ = [
    "counted", "duration", "first_line", "of_unit", "rate", "told_by", "took", "unsuccessful", "were", "when",
]  # fmt: skip

_DAY_S = 86_400


def unsuccessful(failed: int, invalid: int) -> str:
    """Return `2 failed, 3 left out as invalid`; `invalid` is the number of `failed` rows that cannot be used."""
    left_out = f", {invalid:,} left out as invalid" if invalid else ""
    return f"{max(0, failed - invalid):,} failed{left_out}"


def were(number: int) -> str:
    return "was" if number == 1 else "were"


def duration(seconds: float) -> str:
    """Return a duration as `0:42`, `1:02:03`, `3 d 4 h`."""
    if seconds >= 2 * _DAY_S:
        days, rest = divmod(int(seconds), _DAY_S)
        return f"{days} d {rest // 3600} h"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def took(milliseconds: int) -> str:
    """Return how long one thing took: `4 ms`, `1.2 s`, `2:05`."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    return f"{milliseconds / 1000:.1f} s" if milliseconds < 120_000 else duration(milliseconds / 1000)


def when(unix_ms: int, now: datetime | None = None) -> str:
    """Return `14:03:07` today, `Nov 26 14:03:07` this year, else with the year, in local time. Empty for 0."""
    if not unix_ms:
        return ""
    at = datetime.fromtimestamp(unix_ms / 1000).astimezone()
    today = now or datetime.now().astimezone()
    clock = f"{at:%H:%M:%S}"
    if at.date() == today.date():
        return clock
    day = f"{at:%b} {at.day}"
    return f"{day} {clock}" if at.year == today.year else f"{day}, {at.year}, {clock}"


def told_by(number: int) -> str:
    """Return the reason given by a process that this signal ends."""
    return "told to stop by " + ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


def first_line(text: str, limit: int = 200) -> str:
    """Return the first line, cut to `limit` characters for a table, with short ids."""
    line = shortened(visible(next((part.strip() for part in text.splitlines() if part.strip()), "")))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def rate(per_s: float) -> str:
    """Return a rate with three significant digits: `0.05`, `7.3`, `1,230`."""
    if per_s >= 100:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2g}"
