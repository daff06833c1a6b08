"""Finds the run that the user names by a directory, a name below the directory of runs, an id, or @last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollout.cli.references import LAST, means
from rollout.client.recent import recent_runs
from rollout.model.errors import ConfigError
from rollout.model.ids import is_ulid, short
from rollout.workloads.experiment.control import read_control
from rollout.workloads.experiment.resolve import digest_of
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output import claimed, holder_of, saved_state, saved_summary

RUNS_DIR = ".lab/runs"
_DONE, _KILLED = "completed", "killed"


@dataclass(frozen=True, slots=True)
class Found:
    """A run. `config` is its configuration, with the `resolved` experiment. `state` is the one in which it ended
    according to its files, or ""."""

    directory: Path
    run_id: str
    config: JsonObject
    state: str

    @property
    def resolved(self) -> JsonObject:
        return self.config["experiment"]

    @property
    def part(self) -> range | None:
        """The slots of the schedule that it runs, None for all."""
        part = self.config.get("part")
        return None if part is None else range(*part)


def run_at(directory: Path) -> Found | None:
    """Return the run in `directory`, or None if there is no run of an experiment. Blocking."""
    stored = claimed(directory)
    if stored is None or "experiment" not in stored["config"]:
        return None
    state = saved_state(directory)
    summary = saved_summary(directory, state) if state is not None else None
    ended = (summary or {}).get("state", "") or _killed(directory)
    return Found(directory, stored["run_id"], stored["config"], ended)


def _killed(directory: Path) -> str:
    """Return the state of a run that was killed while no command used it, else ""."""
    with suppress(ConfigError):
        control = read_control(directory)
        if control is not None and control.status == _KILLED:
            return _KILLED
    return ""


def find_run(text: str, runs_dir: Path) -> Found:
    """Find a run. Raises ConfigError if there is none, or if several match. Blocking."""
    path = Path(text).expanduser()
    if (found := run_at(path)) is not None:
        return found
    runs = list(runs_below(runs_dir))
    if text == LAST:
        known = {one.run_id: one for one in runs}
        last = next((known[run_id] for run_id in recent_runs() if run_id in known), None)
        if last is not None:
            return last
        raise ConfigError(f"{LAST}: no run below {runs_dir} was submitted from here")
    named = [one for one in runs if one.directory.name == text]
    meant = named or [
        one for one in runs if one.run_id == text.upper() or (not is_ulid(text.upper()) and means(one.run_id, text))
    ]
    if len(meant) == 1:
        return meant[0]
    if meant:
        listed = ", ".join(f"{short(one.run_id)} ({one.directory})" for one in meant)
        raise ConfigError(f"{text!r} may be any of {len(meant)} runs: {listed}")
    names = ", ".join(one.directory.name for one in runs[:10])
    raise ConfigError(f"{text!r} is no run of an experiment in {runs_dir}" + (f": there are {names}" if names else ""))


def runs_below(runs_dir: Path) -> Iterator[Found]:
    """Yield runs in order of name."""
    if runs_dir.is_dir():
        for directory in sorted(runs_dir.iterdir()):
            if (found := run_at(directory)) is not None:
                yield found


def directory_for(
    resolved: JsonObject, runs_dir: Path, name: str, *, goes_on: bool = True, killed: bool = False
) -> tuple[Path, bool]:
    """Return the directory for a run of this experiment, and whether a run continues there: with `goes_on` the newest
    unfinished run, or also a killed one with `killed`, else a free directory. `name` is one that the user gave; raises
    ConfigError if a run of another experiment has it.

    A directory in which another command is about to start a run is not free: that command's lock refuses this one.
    """
    digest = digest_of(resolved)
    if name:
        found = run_at(runs_dir / name)
        if found is not None and digest_of(found.resolved) != digest:
            raise ConfigError(f"--name: {found.directory} holds a run of another experiment: choose another name")
        return runs_dir / name, found is not None
    ended = (_DONE,) if killed else (_DONE, _KILLED)
    same = [one for one in runs_below(runs_dir) if digest_of(one.resolved) == digest and one.state not in ended]
    if same and goes_on:
        return max(same, key=lambda one: one.run_id).directory, True
    base, number = resolved["experiment"]["id"], 1
    while (directory := runs_dir / (base if number == 1 else f"{base}-{number}")).exists():
        if run_at(directory) is None and holder_of(directory):
            return directory, True
        number += 1
    return directory, False
