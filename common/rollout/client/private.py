"""The directory of a private cluster: whether it is running, its address, and the command that continues it.

Its owner, a command that runs `Embedded`, holds a lock as long as it lives. The holder may start a coordinator there;
others find the owner's address in a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.client.account import keep_lines, kept_lines
from rollout.files import FileLock, replacing

STATE_DIR = ".rollout"
"""Directory below an output directory with the private cluster's ledger, objects, certificates and logs."""
DATABASE = "rollout.db"
_LOCK = "owner.lock"
_ADDRESS = "address.json"
_COMMAND = "command.json"
_KNOWN, _KNOWN_MAX = "private-runs", 500


@dataclass(frozen=True, slots=True)
class Command:
    """A command line that continues the run of an output directory, and where to type it."""

    line: str
    cwd: str

    def going_on(self) -> Command:
        """The command that also continues a killed run."""
        named = {"--resume", "--continue"}.intersection(self.line.split())
        line = self.line if named else f"{self.line} --resume @last"
        return Command(line, self.cwd)

    @property
    def is_of_here(self) -> bool:
        return self.cwd == _cwd()

    def __str__(self) -> str:
        return self.line if self.is_of_here else f"{self.line}   (in {self.cwd})"


@dataclass(frozen=True, slots=True)
class PrivateRun:
    """A run of a private cluster, as recorded by the command that opened it."""

    run_id: str
    name: str
    state: Path


class OwnerLock(FileLock):
    """The lock of the process that runs the cluster of a directory."""

    def __init__(self, state: Path) -> None:
        super().__init__(state / _LOCK)

    def try_acquire(self) -> bool:
        if not self.held and super().try_acquire():
            forget_address(self.path.parent)  # of an owner that was killed
        return self.held


def state_of(directory: Path) -> Path | None:
    """Return the state directory of an output directory, or `directory` itself if it is one, or None."""
    for state in (directory / STATE_DIR, directory):
        with suppress(OSError):
            if state.resolve().name != STATE_DIR:  # a coordinator's own directory may hold the same two files
                continue
            if (state / DATABASE).is_file() and (state / "coordinator.toml").is_file():
                return state
    return None


def states_below(directory: Path) -> list[Path]:
    """Return those of the output directories in `directory`, and one level deeper as a job's are, the most recently
    written first."""
    found: list[tuple[float, Path]] = []
    for child in _directories(directory):
        for output in (child, *_directories(child)):
            database = output / STATE_DIR / DATABASE
            with suppress(OSError):
                if database.is_file():
                    found.append((database.stat().st_mtime, database.parent))
    return [state for _, state in sorted(found, reverse=True)]


def _directories(directory: Path) -> Iterator[Path]:
    """Yield directories in it that are not hidden; none if it cannot be read."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir():
                yield directory / entry.name


def remember_address(state: Path, address: str) -> None:
    _write(state / _ADDRESS, {"address": address, "pid": os.getpid()})


def forget_address(state: Path) -> None:
    (state / _ADDRESS).unlink(missing_ok=True)


def address_of(state: Path) -> str:
    """Return the address of the owner's coordinator, "" if unknown."""
    return str(_read(state / _ADDRESS).get("address", ""))


def owner_of(state: Path) -> int:
    """Return the process that recorded the address, which may have been killed since; 0 for none."""
    pid = _read(state / _ADDRESS).get("pid", 0)
    return pid if isinstance(pid, int) else 0


def remember_command(state: Path, line: str) -> None:
    """Record the command line. A read-only directory does without."""
    with suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        _write(state / _COMMAND, {"line": line, "cwd": _cwd()})


def command_of(state: Path) -> Command | None:
    """Return the last command line that worked on the run."""
    found = _read(state / _COMMAND)
    return Command(str(found["line"]), str(found.get("cwd", ""))) if "line" in found else None


def remember_private_run(run: PrivateRun) -> None:
    """Record the run, so that commands in other directories find it."""
    known = [other for other in known_private_runs() if other.run_id != run.run_id]
    lines = [[one.run_id, one.name, str(one.state)] for one in [*known, run][-_KNOWN_MAX:]]
    keep_lines(_KNOWN, map(json.dumps, lines))


def private_runs() -> list[PrivateRun]:
    """Return this account's runs on this machine whose cluster still exists, the newest last."""
    return [run for run in known_private_runs() if state_of(run.state) is not None]


def known_private_runs() -> list[PrivateRun]:
    """Return the runs, including those whose cluster was deleted."""
    found: list[PrivateRun] = []
    with suppress(ValueError):
        for line in kept_lines(_KNOWN):
            run_id, name, state = json.loads(line)
            found.append(PrivateRun(str(run_id), str(name), Path(str(state))))
    return found


def _cwd() -> str:
    with suppress(OSError):
        return str(Path.cwd())
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _write(path: Path, value: dict[str, Any]) -> None:
    with replacing(path, durable=False) as file:
        # A path or an argument may hold bytes that are no text: JSON's escapes carry them.
        file.write(json.dumps(value).encode("ascii"))
