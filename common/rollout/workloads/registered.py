"""The workloads of installed packages, ours and third parties'. Each is imported on demand.

A workload with commands other than `rollout NAME VERB --config FILE` has a package `commands` next to the module of its
class, with `COMMANDS`: a mapping from names to `Command`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rollout.model.errors import PluginError

if TYPE_CHECKING:
    from rollout.workloads.port import Workload

GROUP = "rollout.workloads"
"""The entry point group of workloads."""


@cache
def entries() -> dict[str, EntryPoint]:
    """Return the entry points by name, sorted."""
    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


@cache
def load(name: str) -> Workload[Any, Any]:
    """Load a workload. Raises KeyError if nothing registers it, PluginError if its package cannot be imported or
    registers something else."""
    from rollout.workloads.port import Workload  # commands that need no workload start faster without

    entry = entries()[name]
    owner = f" of {entry.dist.name}" if entry.dist else ""
    try:
        # Whatever the module of a third party does wrong, the other commands must work.
        made = entry.load()()
    except Exception as error:
        raise PluginError(
            f"the workload {name}{owner} cannot be loaded from {entry.value}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Workload) or made.name != name:
        raise PluginError(
            f"the workload {name}{owner} cannot be used: {entry.value} must be a class derived from "
            f'rollout.workloads.port.Workload with name = "{name}"'
        )
    return made  # pyright: ignore[reportUnknownVariableType]


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the program `rollout`. `help` is a sentence for `rollout --help`. `app` is the `module:attribute` of
    its `typer.Typer`, imported when the command is called."""

    help: str
    app: str


@cache
def own_commands(name: str) -> Mapping[str, Command]:
    """Return the commands of a workload's package; empty if it has the standard one. Raises PluginError."""
    package = f"{entries()[name].module.rpartition('.')[0]}.commands"
    try:
        return import_module(package).COMMANDS if _is_there(package) else {}
    except Exception as error:  # whatever the package of a third party does wrong, the other commands must work
        raise PluginError(
            f"the commands of the workload {name} cannot be loaded from {package}: {type(error).__name__}: {error}"
        ) from error


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor is the package of the workload: `load` says so
        return False


def find(name: str) -> Workload[Any, Any] | None:
    """Return a workload, or None if it is not registered here or cannot be loaded: a cluster may run workloads that
    this machine lacks."""
    try:
        return load(name)
    except (KeyError, PluginError):
        return None


def unit_of(name: str) -> tuple[str, str]:
    """Return the name of its units, and of what its `units_out` count, "" for nothing to show."""
    workload = find(name)
    return (workload.unit, workload.measure) if workload is not None else ("items", "")
