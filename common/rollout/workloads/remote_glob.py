"""Which objects of a bucket a pattern names: `*`, `?`, `[...]` and `**` as in paths on disk.

Only what begins with the part before the first wildcard is listed, one level at a time unless there is a `**`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rollout.cloud.bucket import Blob, Bucket
from rollout.cloud.url import has_wildcard

Listed = Callable[[int], object]
"""Hears how many entries a listing has brought so far."""
_EVERY = 1000


async def matching(bucket: Bucket, pattern: str, listed: Listed) -> AsyncGenerator[Blob]:
    """Objects whose keys match, in no certain order. As on disk a wildcard takes no leading dot and no slash."""
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if has_wildcard(part))
    counter = _Counter(listed)
    async with aclosing(_below(bucket, "".join(f"{part}/" for part in parts[:first]), parts[first:], counter)) as found:
        async for blob in found:
            yield blob


async def _below(bucket: Bucket, base: str, parts: list[str], counter: _Counter) -> AsyncGenerator[Blob]:
    part, rest = parts[0], parts[1:]
    if not has_wildcard(part):
        if rest:
            async for blob in _below(bucket, f"{base}{part}/", rest, counter):
                yield blob
        elif (blob := await bucket.head(base + part)) is not None:
            yield blob
        return
    prefix = base + _fixed(part)
    if part == "**":
        matches = re.compile(_deep(parts))
        async for blob in bucket.list(base):
            counter.add()
            if matches.fullmatch(blob.key[len(base) :]):
                yield blob
        return
    matches = re.compile(_one(part))
    async for blob in bucket.list(prefix, delimiter="/"):
        counter.add()
        name = blob.key[len(base) :]
        if blob.size >= 0:
            if not rest and matches.fullmatch(name):
                yield blob
        elif rest and matches.fullmatch(name.removesuffix("/")):
            async for deeper in _below(bucket, blob.key, rest, counter):
                yield deeper


class _Counter:
    def __init__(self, listed: Listed) -> None:
        self._listed = listed
        self._count = 0

    def add(self) -> None:
        self._count += 1
        if self._count % _EVERY == 0:
            self._listed(self._count)


def _fixed(part: str) -> str:
    found = re.search(r"[*?\[]", part)
    return part[: found.start()] if found else part


def _one(part: str) -> str:
    """The expression of one part of a pattern: no wildcard takes a slash, nor a dot at the beginning."""
    return ("" if part.startswith(".") else r"(?!\.)") + _within_part(part)


def _deep(parts: list[str]) -> str:
    """The expression of several, the first of which is `**`: none or more directories."""
    expression = ""
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if part == "**":
            expression += r"(?:(?!\.)[^/]+/)*" + (r"(?!\.)[^/]+" if last else "")
            continue
        expression += _one(part) + ("" if last else "/")
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
