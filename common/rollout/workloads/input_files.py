"""Expands the patterns of an input to files and streams: in order, without duplicates or files that a run writes."""

from __future__ import annotations

import difflib
import glob
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollout.cloud.url import BucketUrl
from rollout.model.errors import InputError
from rollout.model.problems import problems
from rollout.workloads.output import RESULT_FILES, RUN_ID
from rollout.workloads.remote_files import Matches, RemoteFile, hidden_text
from rollout.workloads.saved_datasets import is_dataset, split_directory
from rollout.workloads.sections import Format
from rollout.workloads.spool import Spool, Stream, descriptor

_ULID_OR_UNKNOWN = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}|unknown")
_NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class InputFile:
    """`name` is shown to users, `path` is the file: the copy of a stream or an object, or the directory of a dataset. A
    part of a file (`rollout.workloads.following`) is the `rows` after its first `skip`; None means all of them."""

    name: str
    path: Path
    skip: int = 0
    rows: int | None = None


@dataclass(slots=True)
class Expansion:
    """The expansion of patterns. `notes` are for the user. `key` is that of the configuration with the patterns."""

    key: str = "input.glob"
    found: dict[object, InputFile | Stream | RemoteFile] = field(
        default_factory=dict[object, InputFile | Stream | RemoteFile]
    )
    left_out: list[str] = field(default_factory=list[str])
    again: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])
    hidden: list[str] = field(default_factory=list[str])

    @property
    def notes(self) -> list[str]:
        notes: list[str] = []
        if self.left_out:
            notes.append(
                f"{self.key}: left out what a run writes: {_shown(self.left_out)} (results of another run are read "
                "when they are named without a wildcard)"
            )
        if self.hidden:
            notes.append(f"{self.key}{hidden_text(self.hidden)}")
        if self.again:
            notes.append(f"{self.key}: read once, though it is named again or linked to: {_shown(self.again)}")
        return notes


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    return ", ".join(names[:_NAMED_MAX]) + more


_NO_OBJECTS: Mapping[str, Matches] = {}


def expand(
    patterns: Sequence[str],
    *,
    exclude: Path,
    written: Iterable[str],
    spool: Spool,
    key: str = "input.glob",
    remote: Mapping[str, Matches] = _NO_OBJECTS,
    own: BucketUrl | None = None,
    form: Format = "jsonl",
    split: str | None = None,
    may_be_none: bool = False,
) -> Expansion:
    """Return files, streams and objects in the order of `patterns`. Raises InputError with every wrong pattern.

    `exclude` is the run's own output directory. `written` are names of result files. `remote` has the matches of
    patterns that are URLs. `own` is the output, if that is in a bucket. `form` is the format of the files; datasets are
    directories, of which `split` names a part. `may_be_none` allows a pattern without matches.
    """
    datasets = _Datasets(form, split, key.rpartition(".")[0])
    names = frozenset(written) | frozenset(RESULT_FILES) | {RUN_ID}
    expansion = Expansion(key)
    for pattern in patterns:
        if pattern in remote:
            _add_objects(expansion, pattern, remote[pattern], names, own)
        else:
            _expand_one(expansion, pattern, _Written(exclude, names), spool, datasets, may_be_none=may_be_none)
    if expansion.faults:
        raise InputError(problems(expansion.faults))
    found = expansion.found.values()
    if split is not None and not any(isinstance(one, InputFile) and one.path.is_dir() for one in found):
        raise InputError(f"{datasets.section}.split: no dataset on disk is among the files: remove it")
    return expansion


def _expand_one(
    expansion: Expansion, pattern: str, written: _Written, spool: Spool, datasets: _Datasets, *, may_be_none: bool
) -> None:
    if (stream := descriptor(pattern)) is not None:
        expansion.found.setdefault(stream.key, stream)
        return
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
    wild = glob.has_magic(pattern)
    if not matches and os.path.lexists(pattern):
        matches, wild = [pattern], False  # a name with brackets in it
    usable = 0
    for match in matches:
        if datasets.takes(match, wild=wild):
            datasets.add(expansion, match)
            usable += 1
            continue
        fault, skipped = _take(expansion, match, written, wild=wild, named=not wild or _names_it(pattern))
        if fault:
            expansion.faults.append(f"{expansion.key}: {fault}")
        usable += not skipped
    if usable or may_be_none:
        return
    gone = Stream(pattern)
    if spool.has(gone):
        expansion.found.setdefault(pattern, gone)
        return
    where = "" if Path(pattern).is_absolute() else f" in the current directory {Path.cwd()}"
    why = f": {len(matches)} were left out, as directories or as what a run writes" if matches else ""
    expansion.faults.append(f"{expansion.key}: no file matches {pattern!r}{where}{why}{_near(pattern)}")


def _add_objects(
    expansion: Expansion, pattern: str, matches: Matches, names: frozenset[str], own: BucketUrl | None
) -> None:
    if matches.fault:
        expansion.faults.append(f"{expansion.key}: {matches.fault}")
        return
    usable = 0
    expansion.hidden += [name for name in matches.hidden if name not in expansion.hidden]
    for file in matches.files:
        ours = file.directory == own and is_result(file.url.name, names)
        if ours and not matches.wild:
            what = f"{file.name} is what this run writes: name another output directory"
            expansion.faults.append(f"{expansion.key}: {what}")
            usable += 1
            continue
        theirs = matches.wild and not _names_it(pattern) and file.directory in matches.runs
        if ours or (theirs and is_result(file.url.name, names)):
            expansion.left_out.append(file.name)
            continue
        usable += 1
        if file.url in expansion.found:
            expansion.again.append(file.name)
        expansion.found.setdefault(file.url, file)
    if not usable:
        expansion.faults.append(
            f"{expansion.key}: no object matches {pattern!r}: {len(matches.files)} were left out as what a run writes"
        )


_LIKE = 0.75
"""Required similarity of a suggested file name: suffixes alone make names half alike."""


def _near(pattern: str) -> str:
    """Return the file that was probably meant."""
    path = Path(pattern)
    if not glob.has_magic(str(path.parent)) and not path.parent.exists():
        return f": there is no directory {path.parent}"
    with suppress(OSError):
        beside = [one.name for one in path.parent.iterdir()]
        if not glob.has_magic(pattern) and (near := difflib.get_close_matches(path.name, beside, n=1, cutoff=_LIKE)):
            return f"; did you mean {path.with_name(near[0])}?"
    return ": check the path"


def _names_it(pattern: str) -> bool:
    """Return whether the file itself is named, as in runs/*/completions.jsonl."""
    return not glob.has_magic(os.path.basename(pattern))  # noqa: PTH119


def _take(expansion: Expansion, match: str, written: _Written, *, wild: bool, named: bool) -> tuple[str, bool]:
    """Return (fault, whether it is not part of the input)."""
    path = Path(match)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"cannot read {match}: {error.strerror or error}: check that it exists and its rights", False
    if stat.S_ISDIR(mode):
        return ("", True) if wild else (f"{match} is a directory: name its files, such as {path / '*.jsonl'}", False)
    if stat.S_ISFIFO(mode):
        stream = Stream(match)
        expansion.found.setdefault(stream.key, stream)
        return "", False
    if not stat.S_ISREG(mode):
        kind = "a socket" if stat.S_ISSOCK(mode) else "a device"
        return f"{match} is {kind}: rows are read from files, pipes and standard input (-)", False
    real = path.resolve()
    if written.here(real):
        if wild:
            expansion.left_out.append(match)
            return "", True
        return f"{match} is what this run writes: name another output directory", False
    if not named and written.elsewhere(real):
        expansion.left_out.append(match)
        return "", True
    if real in expansion.found:
        expansion.again.append(match)
    expansion.found.setdefault(real, InputFile(match, path))
    return "", False


@dataclass(frozen=True, slots=True)
class _Datasets:
    """Directories that are datasets. `section` is that of the configuration with `split`."""

    form: Format
    split: str | None
    section: str

    def takes(self, match: str, *, wild: bool) -> bool:
        """Return whether it is a dataset. A wildcard that may mean files takes none, because it also means the files
        inside."""
        return (self.form == "dataset" or (self.form == "auto" and not wild)) and is_dataset(Path(match))

    def add(self, expansion: Expansion, match: str) -> None:
        try:
            path = split_directory(Path(match), self.split, self.section)
        except InputError as error:
            expansion.faults.append(error.message)
            return
        if path.resolve() in expansion.found:
            expansion.again.append(match)
        expansion.found.setdefault(path.resolve(), InputFile(str(path), path))


class _Written:
    """Recognises what runs write: into `own`, and into any directory with a run-id."""

    def __init__(self, own: Path, names: frozenset[str]) -> None:
        self._own = own.expanduser().resolve()
        self._names = names
        self._runs: dict[Path, bool] = {}

    def here(self, real: Path) -> bool:
        if not real.is_relative_to(self._own):
            return False
        first, *deeper = real.relative_to(self._own).parts
        return first.startswith(".") or (not deeper and is_result(first, self._names))

    def elsewhere(self, real: Path) -> bool:
        parent = real.parent
        if parent not in self._runs:
            self._runs[parent] = (parent / RUN_ID).exists()
        return self._runs[parent] and is_result(real.name, self._names)


def is_result(name: str, names: frozenset[str]) -> bool:
    """Return whether a run writes a file of that name. `names` are those of result files."""
    if name in names:
        return True
    # Results of an earlier run that were moved aside: completions.RUN_ID.jsonl
    stem, _, suffix = name.rpartition(".")
    stem, _, run = stem.rpartition(".")
    return bool(_ULID_OR_UNKNOWN.fullmatch(run)) and f"{stem}.{suffix}" in names
