"""Lines that are written down for this account on this machine, by name. An account that cannot does without."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from rollout.files import replacing
from rollout.workloads.staging import state_home


def kept_lines(name: str) -> list[str]:
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: it has no home
        return (state_home() / name).read_text("ascii").splitlines()
    return []


def keep_lines(name: str, lines: Iterable[str]) -> None:
    """Replace the lines that were there. ASCII."""
    with suppress(OSError, RuntimeError):
        path = state_home() / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path, durable=False, shared=True) as file:
            file.write("".join(f"{line}\n" for line in lines).encode("ascii"))
