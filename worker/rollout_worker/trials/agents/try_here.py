"""Tests an agent before a job begins, in a process of its own because its module may do anything.

python -m rollout_worker.trials.agents.try_here ANSWER < agent.json

`agent.json` is the agent's section of job.yaml. ANSWER gets {"key": ..., "fault": ...}, {"key": ..., "warning": ...} or
{}. The class is imported but not called, and the key of a CLI's service is looked for but not used.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.workloads.job.config import AgentSection
from rollout.workloads.job.templates import fill_in

from rollout_worker.trials.agents.coding_cli import CodingCliAgent
from rollout_worker.trials.agents.make import class_of, make_agent
from rollout_worker.trials.port import TrialFault


@dataclass(frozen=True, slots=True)
class _Asker:
    env: Mapping[str, str]
    model_name: str | None
    base_url: str | None


def try_agent(section: AgentSection, environ: Mapping[str, str]) -> dict[str, str]:
    key = "import_path" if section.import_path is not None else "name"
    try:
        cls = class_of(section)
        if cls is not None:
            return _of_kwargs(cls, section.kwargs)
        agent = make_agent(section)
    except TrialFault as fault:
        return {"key": key, "fault": fault.message}
    if not isinstance(agent, CodingCliAgent):
        return {}
    try:
        agent.environment(_Asker(fill_in(section.env, environ), section.model_name, section.base_url))
    except TrialFault as fault:
        return {"key": "env", "warning": f"{fault.message}: every trial of it will fail"}
    except ValueError:  # a variable that is not set, which is told by itself
        pass
    return {}


def _of_kwargs(cls: Any, kwargs: dict[str, Any]) -> dict[str, str]:
    if not callable(cls):
        return {"key": "import_path", "fault": f"it is no class, but a {type(cls).__name__}"}
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        return {"key": "kwargs", "fault": f"{cls.__name__} does not take them: {error}"}
    except ValueError:  # of a class that is not written in Python nothing is known
        pass
    return {}


if __name__ == "__main__":
    told = try_agent(AgentSection.model_validate_json(sys.stdin.read()), os.environ)
    Path(sys.argv[1]).write_text(json.dumps(told))
