"""Identifiers: ULIDs for runs, incarnations, hosts and sessions; blake3 content ids for items and objects."""

from __future__ import annotations

from typing import NewType

from rollout.model.errors import InputError

RunId = NewType("RunId", str)
Incarnation = NewType("Incarnation", str)
SessionId = NewType("SessionId", str)
HostId = NewType("HostId", str)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ALPHABET = frozenset(_CROCKFORD)


def is_ulid(text: str) -> bool:
    """Return whether it is 26 Crockford characters whose value fits 128 bits (https://github.com/ulid/spec)."""
    return len(text) == 26 and text[0] <= "7" and _ALPHABET.issuperset(text)


def check_ulid(text: str, what: str = "id") -> str:
    """Return `text` if it is a ULID. Raises InputError, naming `what`."""
    if not is_ulid(text):
        raise InputError(f"{what} must be a ULID (26 characters of {_CROCKFORD}), got {text!r}")
    return text


SHORT = 8
"""Characters of an id shown to users: the last ones, 40 random bits, because ids of the same minute begin alike."""


def short(identifier: str) -> str:
    """Return the id of a run, worker or host as shown to users; other text is returned unchanged."""
    return identifier[-SHORT:] if is_ulid(identifier) else identifier


def means(identifier: str, text: str) -> bool:
    """Return whether an id, or its short form, begins with `text`."""
    part = text.upper()
    return identifier.startswith(part) or short(identifier).startswith(part)


def make_ulid(unix_ms: int, entropy: bytes) -> str:
    """Make a ULID from the wall clock in milliseconds and 10 bytes of entropy, which the caller provides."""
    value = (unix_ms << 80) | int.from_bytes(entropy[:10], "big")
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))
