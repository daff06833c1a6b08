"""Agents of a job whose workers are started here, tried before it begins: what would fail every trial, is told now."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.config.interpreter import python_module
from rollout.workloads.job.agent_kinds import KINDS, NOP, ORACLE, SHELL_LOOP, kind_of
from rollout.workloads.job.config import AgentSection, JobConfig

_TRY = "rollout_worker.trials.agents.try_here"
_LIMIT_S = 60.0
_PLAIN = tuple(KINDS[name] for name in (ORACLE, NOP, SHELL_LOOP))


def try_agents(job: JobConfig, tell: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """(faults, warnings), each with the key that it is of. `tell` hears of each agent before it is tried.

    Blocking, for as long as the modules of agents take to be imported.
    """
    faults, warnings = list[str](), list[str]()
    for index, agent in enumerate(job.agents):
        if agent.execute or (agent.import_path is None and kind_of(agent.name) in _PLAIN):
            continue
        tell(f"trying agent {agent.id}")
        for kind, key, text in _tried(agent):
            (faults if kind == "fault" else warnings).append(f"agents.{index}.{key}: {text}")
    return faults, [f"warning: {text}" for text in warnings]


def _tried(agent: AgentSection) -> Iterator[tuple[str, str, str]]:
    """In the interpreter and the directory that workers will have."""
    key = "name" if agent.import_path is None else "import_path"
    with TemporaryDirectory(prefix="rollout-agent-") as directory:
        answer = Path(directory, "answer")
        try:
            done = subprocess.run(
                python_module(_TRY, str(answer)), input=agent.model_dump_json(), timeout=_LIMIT_S,
                capture_output=True, text=True, errors="replace", check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            yield "warning", key, f"its module was not imported in {_LIMIT_S:g} s, so it is not known whether it can be"
            return
        if not answer.exists():
            lines = done.stderr.strip().splitlines() or [""]
            yield "fault", key, f"its module ends the process that imports it ({done.returncode}): {lines[-1]}"
            return
        told = json.loads(answer.read_text())
        for kind in ("fault", "warning"):
            if kind in told:
                yield kind, told["key"], told[kind]
