"""Makes the agent of a section of job.yaml."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from rollout.processes.interpreter import import_from
from rollout.workloads.job.agent_kinds import GROUP, NOP, ORACLE, SHELL_LOOP, CodingCliKwargs, ShellLoopKwargs, kind_of
from rollout.workloads.job.config import AgentSection

from rollout_worker.trials.agents.coding_cli import CodingCliAgent
from rollout_worker.trials.agents.coding_clis import CLIS
from rollout_worker.trials.agents.plain import BashAgent, NopAgent
from rollout_worker.trials.agents.shell_loop import ShellLoop
from rollout_worker.trials.port import Agent, TrialFault

_METHODS = {"install": 1, "execute": 2}
"""Number of arguments of each method."""


def make_agent(section: AgentSection) -> Agent:
    """Make a new agent for one trial. The oracle is not among them: the trial itself runs the task's solution.

    Raises TrialFault (`agent_install_failed`) if the class cannot be imported here, does not accept its `kwargs`, or is
    not an agent. Another worker may have what this one lacks.
    """
    if section.execute:
        return BashAgent(section.install, section.execute)
    kind = kind_of(section.name) if section.import_path is None else None
    if kind is None:
        return _made(class_of(section), section.kwargs, section.import_path or section.name)
    if kind.name == ORACLE:
        raise ValueError("the oracle is run by the trial: it needs the task's solution")
    if kind.name == NOP:
        return NopAgent()
    if kind.name == SHELL_LOOP:
        return ShellLoop(ShellLoopKwargs.model_validate(section.kwargs))
    return CodingCliAgent(CLIS[kind.name], CodingCliKwargs.model_validate(section.kwargs))


def class_of(section: AgentSection) -> Any:
    """Return the class of an imported agent, or None for bash and built-in agents. Raises TrialFault."""
    if section.import_path is not None:
        return _imported(section.import_path)
    return None if section.execute or kind_of(section.name) is not None else _registered(section.name)


def _fault(message: str) -> TrialFault:
    return TrialFault("agent_install_failed", message)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    import_from(str(Path.cwd()))  # of the worker: on one machine, that of the command
    try:
        found: Any = import_module(module)
    except Exception as error:  # whatever the module does as it is imported
        raise _fault(
            f"{path} cannot be imported on this worker: {type(error).__name__}: {error}; install its package there"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise _fault(f"{path}: {module} has no {name}")
        found = getattr(found, part)
    return found


def _registered(name: str) -> Any:
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise _fault(
            f'no package on this worker brings an agent "{name}" (entry point group {GROUP}): install it there'
        )
    return _imported(next(iter(found)).value)


def _made(cls: Any, kwargs: dict[str, Any], what: str) -> Agent:
    if not callable(cls):
        raise _fault(f"{what} is no class, but a {type(cls).__name__}")
    try:
        agent = cls(**kwargs)
    except Exception as error:  # it is code of the user's
        given = ", ".join(kwargs) or "none"
        raise _fault(f"{what} cannot be made with its kwargs ({given}): {type(error).__name__}: {error}") from error
    if faults := list(_lacks(agent)):
        raise _fault(f"{what} is no agent: {'; '.join(faults)}; see docs/agents.md")
    return cast("Agent", agent)


def _lacks(agent: Any) -> list[str]:
    """Return the methods that the port requires and this object lacks."""
    faults: list[str] = []
    if not isinstance(getattr(agent, "version", None), str):
        faults.append('it needs an attribute version, a string that may be ""')
    for name, arguments in _METHODS.items():
        method = getattr(agent, name, None)
        shape = f"async def {name}({', '.join(('self', 'place', 'instruction')[: arguments + 1])})"
        if not inspect.iscoroutinefunction(method):
            faults.append(f"it needs {shape}")
            continue
        try:
            inspect.signature(method).bind(*range(arguments))
        except TypeError as error:
            faults.append(f"{name} must be {shape}: {error}")
    return faults
