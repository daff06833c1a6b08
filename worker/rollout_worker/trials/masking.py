"""Replaces secret values of a trial by `***` in output, log files and records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollout.config.secret_names import texts_of

SHOWN = "***"
_PIECE = 1 << 20
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # halves of surrogate pairs that stand for no byte
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Return values of variables whose names suggest a secret."""
    return [value for name, value in env.items() if _SECRET.search(name)]


class Masks:
    """Hides values in text and bytes; values may be added later."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.values: tuple[bytes, ...] = ()  # the longest first
        self.pattern: re.Pattern[bytes] | None = None
        self.hide(values)

    def hide(self, values: Iterable[str]) -> None:
        found = {text.encode(errors="surrogateescape") for value in values for text in texts_of(value)}
        wanted = found | set(self.values)
        if len(wanted) > len(self.values):
            self.values = tuple(sorted(wanted, key=lambda value: (-len(value), value)))
            self.pattern = re.compile(b"|".join(map(re.escape, self.values)))

    def text(self, text: str) -> str:
        if self.pattern is None:
            return text
        text = _NO_BYTE.sub("\ufffd", text)
        return self.pattern.sub(SHOWN.encode(), text.encode(errors="surrogateescape")).decode(errors="surrogateescape")

    def stream(self) -> MaskedStream:
        return MaskedStream(self)

    def file(self, path: Path) -> None:
        """Rewrite `path` if it contains one of the values. Raises OSError. Blocking."""
        if self.pattern is None:
            return
        masked = path.with_name(f"{path.name[:100]}.masked")
        stream, changed = self.stream(), False
        try:
            with path.open("rb") as source, masked.open("wb") as target:
                while piece := source.read(_PIECE):
                    target.write(stream.feed(piece))
                target.write(stream.close())
                changed = stream.masked > 0
            if changed:
                masked.replace(path)
        finally:
            masked.unlink(missing_ok=True)

    def names(self, directory: Path) -> None:
        """Rename what is below `directory` if its name contains one of the values, keeping names distinct.

        Raises OSError. Blocking.
        """
        if self.pattern is None:
            return
        for root, directories, files in os.walk(directory, topdown=False):
            for name in (*directories, *files):
                masked = self.text(name)
                if masked == name:
                    continue
                target, number = Path(root, masked), 1
                while os.path.lexists(target):
                    number += 1
                    target = Path(root, f"{masked}.{number}")
                Path(root, name).rename(target)


class MaskedStream:
    """Masks bytes that arrive in pieces, also values that are split between two."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self._held: bytes = b""
        self.masked = 0

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown: the end is held back if it may be the beginning of a value."""
        pattern = self._masks.pattern
        if pattern is None:
            return data
        data = self._held + data
        self._held = b""
        shown = bytearray()
        at = 0
        for found in pattern.finditer(data):
            if self._begins(data[found.start() :]):
                shown += data[at : found.start()]
                self._held = data[found.start() :]
                return bytes(shown)
            shown += data[at : found.start()] + SHOWN.encode()
            self.masked += 1
            at = found.end()
        hold = self._beginning(data[at:])
        shown += data[at : len(data) - hold]
        self._held = data[len(data) - hold :]
        return bytes(shown)

    def close(self) -> bytes:
        """Return what was held back."""
        held = self._held
        self._held = b""
        if self._masks.pattern is None:
            return held
        shown, masked = self._masks.pattern.subn(SHOWN.encode(), held)
        self.masked += masked
        return shown

    def _begins(self, rest: bytes) -> bool:
        """Return whether a value begins with all of `rest`, and is longer."""
        return any(len(value) > len(rest) and value.startswith(rest) for value in self._masks.values)

    def _beginning(self, rest: bytes) -> int:
        """Return the length of the longest suffix of `rest` that is the beginning of a value."""
        longest = len(self._masks.values[0]) - 1
        return next((n for n in range(min(longest, len(rest)), 0, -1) if self._begins(rest[len(rest) - n :])), 0)
