"""Names that become directories: those of steps, tasks, datasets and agents."""

from __future__ import annotations

import re
import unicodedata

_NOT_PORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[1-9¹²³])", re.IGNORECASE)


def portable_name(name: str) -> str:
    """Return `name` if it is a valid directory name on every system. Raises ValueError with the reason."""
    bad = (
        not name.strip()
        or name in (".", "..")
        or name.endswith((".", " "))
        or _NOT_PORTABLE.search(name)
        or _DEVICE.fullmatch(name.partition(".")[0].rstrip(" "))
        or len(name.encode("utf-8", "surrogateescape")) > 255
    )
    if bad:
        raise ValueError(
            f'"{name[:80]}" cannot be a directory on every system: no / \\ : * ? " < > |, no control characters, no '
            "dot or space at its end, no device of Windows, at most 255 bytes"
        )
    return name


def same_name(name: str) -> str:
    """Return a key that is equal for names that differ only in case or in their form of Unicode."""
    return unicodedata.normalize("NFC", name).casefold()
