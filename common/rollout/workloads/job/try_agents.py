"""Tests the agents of a job whose workers start on this machine, to report at once what would fail every trial."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rollout.config.scratch import Scratch
from rollout.processes.command import run
from rollout.processes.interpreter import python_module
from rollout.workloads.job.agent_kinds import KINDS, NOP, ORACLE, SHELL_LOOP, kind_of
from rollout.workloads.job.config import AgentSection, JobConfig
from rollout.workloads.modules import definition, import_faults, module_file

_TRY = "rollout_worker.trials.agents.try_here"
_LIMIT_S = 60.0
_PLAIN = tuple(KINDS[name] for name in (ORACLE, NOP, SHELL_LOOP))


def try_agents(job: JobConfig, tell: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Return (faults, warnings), each with its key. `tell` is called with each agent before it is tested.

    A user's module is inspected without importing it; agents of packages are tested. Blocking.
    """
    faults, warnings = list[str](), list[str]()
    for index, agent in enumerate(job.agents):
        if agent.execute or (agent.import_path is None and kind_of(agent.name) in _PLAIN):
            continue
        if agent.import_path is not None:
            faults += (f"agents.{index}.{fault}" for fault in _faults_of_class(agent.import_path, agent.kwargs))
            continue
        tell(f"trying agent {agent.id}")
        for kind, key, text in _tried(agent):
            (faults if kind == "fault" else warnings).append(f"agents.{index}.{key}: {text}")
    return faults, [f"warning: {text}" for text in warnings]


def _faults_of_class(path: str, kwargs: Mapping[str, object]) -> Iterator[str]:
    faults = list(import_faults(path))
    yield from (f"import_path: {fault}" for fault in faults)
    module, _, name = path.partition(":")
    file = module_file(Path.cwd(), module)
    made = definition(file, name) if file is not None and not faults else None
    if not isinstance(made, ast.ClassDef) or made.name != name or made.bases or made.keywords or made.decorator_list:
        return
    init = [one.args for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if not init:
        return
    arguments = init[-1]
    named = [one.arg for one in (arguments.posonlyargs + arguments.args)[1:]]
    needed = named[: len(named) - len(arguments.defaults)]
    needed += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    if missing := [one for one in needed if one not in kwargs]:
        yield f"kwargs: {name} needs {', '.join(missing)}"
    known = {*named, *(one.arg for one in arguments.kwonlyargs)}
    if arguments.kwarg is None and (unknown := [one for one in kwargs if one not in known]):
        yield f"kwargs: {name} does not take {', '.join(unknown)}"


def _tried(agent: AgentSection) -> Iterator[tuple[str, str, str]]:
    """Test an agent in the interpreter and directory that workers will use."""
    with Scratch("rollout-agent-") as directory:
        answer = Path(directory, "answer")
        try:
            done = run(python_module(_TRY, str(answer)), given=agent.model_dump_json(), timeout_s=_LIMIT_S)
        except TimeoutError:
            yield (
                "warning",
                "name",
                f"its module was not imported in {_LIMIT_S:g} s, so it is not known whether it can be",
            )
            return
        if not answer.exists():
            yield "fault", "name", f"its module ends the process that imports it ({done.code}): {done.reason}"
            return
        told = json.loads(answer.read_text())
        for kind in ("fault", "warning"):
            if kind in told:
                yield kind, told["key"], told[kind]
