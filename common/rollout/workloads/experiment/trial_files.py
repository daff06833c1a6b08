"""Reads what a trial left, from the files of its record, and moves it to the trial's directory.

Workers are not trusted: contracts are validated, artifacts hashed again, and a fault of a file becomes a sentence of
`TrialFiles.faults`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rollout.model.errors import InputError
from rollout.workloads.experiment.contracts import (
    EVENTS_BYTES_MAX,
    EVENTS_MAX,
    Contract,
    EvidenceRecord,
    HookEvent,
    TrialOutcome,
)
from rollout.workloads.experiment.layout import GRADE, RECORD, RESULT, TRIAL_INPUT, artifact_path
from rollout.workloads.job.result_files import RESULT as JOB_RESULT

C = TypeVar("C", bound=Contract)
_MOVED = (
    (JOB_RESULT, RECORD),
    ("contract/trial_input.json", TRIAL_INPUT),
    ("contract/result.json", RESULT),
    ("agent/stdout.txt", "stdout.log"),
    ("agent/stderr.txt", "stderr.log"),
    ("verifier/grade.json", GRADE),
)
"""Moves, in order: the job's result.json first, because the agent's takes its name."""
_OUTCOME, _EVENTS = "contract/outcome.json", "contract/events.jsonl"
_EVIDENCE, _BLOBS = "evidence/evidence.json", "evidence/artifacts"
_GRADER_EXIT = "verifier/grader_exit_code"


@dataclass(slots=True)
class TrialFiles:
    """A value is None if the worker left no such file, or an invalid one."""

    outcome: TrialOutcome | None = None
    events: list[HookEvent] = field(default_factory=list[HookEvent])
    evidence: EvidenceRecord | None = None
    grade_exit_status: int | None = None
    faults: list[str] = field(default_factory=list[str])


def take(run: Path, directory: Path) -> TrialFiles:
    """Arrange the trial's files in `directory`, and move its artifacts to those of `run`. Call it once, after the files
    were placed. Blocking."""
    found = TrialFiles()
    for source, target in _MOVED:
        if _is_file(directory / source):
            (directory / source).replace(directory / target)
    found.outcome = _read(directory / _OUTCOME, TrialOutcome, found.faults)
    found.evidence = _read(directory / _EVIDENCE, EvidenceRecord, found.faults)
    found.events = _events(directory / _EVENTS, found.faults)
    found.grade_exit_status = _number(directory / _GRADER_EXIT)
    _move_blobs(run, directory / _BLOBS, found.faults)
    return found


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _read(path: Path, contract: type[C], faults: list[str]) -> C | None:
    return _checked(path, contract.bytes_max, contract.decode, faults)


T = TypeVar("T")


def _checked(path: Path, most: int, decode: Callable[[bytes], T], faults: list[str]) -> T | None:
    if not _is_file(path):
        return None
    if path.stat().st_size > most:
        faults.append(f"{path.name}: it is larger than {most >> 20} MiB")
        return None
    try:
        return decode(path.read_bytes())
    except InputError as error:
        faults.append(f"{path.name}: {error.message}")
        return None


def _events(path: Path, faults: list[str]) -> list[HookEvent]:
    raw = _checked(path, EVENTS_BYTES_MAX, bytes, faults) or b""
    found: list[HookEvent] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        if len(found) == EVENTS_MAX:
            faults.append(f"{path.name}: only its first {EVENTS_MAX:,} events are kept")
            break
        try:
            found.append(HookEvent.decode(line))
        except InputError as error:
            faults.append(f"{path.name}:{number}: {error.message}")
    return found


def _number(path: Path) -> int | None:
    text = _checked(path, 64, lambda raw: raw.decode("ascii", "replace").strip(), []) or ""
    return int(text) if text.isdigit() else None


def _move_blobs(run: Path, directory: Path, faults: list[str]) -> None:
    if not directory.is_dir():
        return
    for above, _, names in os.walk(directory):
        for name in names:
            path = Path(above, name)
            if not _is_file(path):
                continue
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != name:
                faults.append(f"evidence: the artifact {name[:80]} has another content than its name says")
                continue
            target = run / artifact_path(digest)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(directory)
