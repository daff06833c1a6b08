"""Matches patterns with objects of a bucket: `*`, `?`, `[...]` and `**` as in paths on disk.

Only keys with the part before the first wildcard are listed, one level at a time unless there is a `**`. In a key `//`,
`.` and `..` have no meaning: a name may be empty, and `**` matches all of them. A name that begins with a dot is
hidden, as on disk, unless it is `.` or `..`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rollout.cloud.bucket import Blob, Bucket
from rollout.cloud.url import has_wildcard

Listed = Callable[[int], object]
"""Called with the number of entries listed so far."""
Hidden = Callable[[str], object]
"""Called with a key that is left out because a name in it begins with a dot; it ends with a slash if more is below
it."""
_EVERY = 1000
_NOT_HIDDEN = r"(?!\.(?!\.?(?:/|\Z)))"


async def matching(
    bucket: Bucket, pattern: str, listed: Listed, hidden: Hidden = lambda _: None
) -> AsyncGenerator[Blob]:
    """Yield objects whose keys match, in no particular order. As on disk, wildcards match neither hidden names nor
    slashes. Empty objects that end with a slash are skipped: some tools use them to show a directory."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if has_wildcard(part))
    seen = _Seen(listed, hidden)
    async with aclosing(_below(bucket, "".join(f"{part}/" for part in parts[:first]), parts[first:], seen)) as found:
        async for blob in found:
            yield blob


async def _below(bucket: Bucket, base: str, parts: list[str], seen: _Seen) -> AsyncGenerator[Blob]:
    part, rest = parts[0], parts[1:]
    if not has_wildcard(part):
        if rest:
            async for blob in _below(bucket, f"{base}{part}/", rest, seen):
                yield blob
        elif (blob := await bucket.head(base + part)) is not None:
            yield blob
        return
    prefix = base + _fixed(part)
    if part == "**":
        shown, also_hidden = (re.compile(_deep(parts, not_hidden)) for not_hidden in (_NOT_HIDDEN, ""))
        async for blob in bucket.list(base):
            if seen.matches(blob, blob.key[len(base) :], shown, also_hidden):
                yield blob
        return
    shown, also_hidden = (re.compile(_one(part, not_hidden)) for not_hidden in (_NOT_HIDDEN, ""))
    async for blob in bucket.list(prefix, delimiter="/"):
        if (blob.size < 0) != bool(rest) or not seen.matches(
            blob, blob.key[len(base) :].removesuffix("/" if rest else ""), shown, also_hidden
        ):
            continue
        if not rest:
            yield blob
        else:
            async for deeper in _below(bucket, blob.key, rest, seen):
                yield deeper


class _Seen:
    def __init__(self, listed: Listed, hidden: Hidden) -> None:
        self._listed = listed
        self._hidden = hidden
        self._count = 0

    def matches(self, blob: Blob, name: str, shown: re.Pattern[str], also_hidden: re.Pattern[str]) -> bool:
        self._count += 1
        if self._count % _EVERY == 0:
            self._listed(self._count)
        if blob.size == 0 and blob.key.endswith("/"):
            return False
        if shown.fullmatch(name):
            return True
        if also_hidden.fullmatch(name):
            self._hidden(blob.key)
        return False


def _fixed(part: str) -> str:
    found = re.search(r"[*?\[]", part)
    return part[: found.start()] if found else part


def _one(part: str, not_hidden: str) -> str:
    """Return the expression of one part of a pattern; wildcards do not match slashes. `not_hidden` is what a name must
    match if the part does not begin with a dot."""
    return ("" if part.startswith(".") else not_hidden) + _within_part(part)


def _deep(parts: list[str], not_hidden: str) -> str:
    """Return the expression of several parts, the first of which is `**`: any number of directories."""
    expression = ""
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            expression += f"(?:{not_hidden}[^/]*/)*" + (f"{not_hidden}[^/]*" if last else "")
            continue
        expression += _one(part, not_hidden) + ("" if last else "/")
    return expression


def _within_part(part: str) -> str:
    expression, at = "", 0
    while at < len(part):
        letter = part[at]
        at += 1
        if letter == "*":
            expression += "[^/]*"
        elif letter == "?":
            expression += "[^/]"
        elif letter == "[" and (end := part.find("]", at + 1 + part.startswith("!", at))) > 0:
            inner = part[at:end].replace("\\", r"\\")
            inner = f"^{inner[1:]}" if inner.startswith("!") else f"\\{inner}" if inner.startswith("^") else inner
            expression += f"(?!/)[{inner}]"
            at = end + 1
        else:
            expression += re.escape(letter)
    return expression
