"""What happens in a seed: a cluster, its work and its faults. Values only, so that a scenario can be cut and written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollout.model.item import ItemSpec
from rollout.model.run import Lane, Policy
from sim_executors import Behaviour


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    at: float
    node: str = ""
    peer: str = ""
    seconds: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Command:
    """An operator's verb, given once the run has that many committed items, then its opposite after `seconds`."""

    run: int
    verb: str
    after: int
    back: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RunPlan:
    client: str
    items: tuple[tuple[Behaviour, int], ...]  # what each does, and which of the specs it has
    specs: tuple[ItemSpec, ...]
    at: float = 0.0
    order: str = "schedule"
    lanes: tuple[Lane, ...] = ()
    policies: tuple[Policy, ...] = ()
    priority: int = 0
    max_in_flight: int = 0
    one_worker: bool = False
    pause_timeout_ms: int = 3000
    kind: str = "slot"  # its workload: the name of an executor

    @property
    def mixed(self) -> bool:
        return any(spec.executor for spec in self.specs) or any(how.calls for how, _ in self.items)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    name: str
    slots: int
    label: str
    rate: float = 1.0
    executors: tuple[str, ...] = ("slot", "engine")  # that it hosts
    devices: int = 0
    joins_at: float = 0.0
    cannot_start: tuple[str, ...] = ()  # of those that it hosts, for good


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    workers: tuple[WorkerPlan, ...]
    coordinators: tuple[tuple[str, float], ...]  # name, rate of its clock
    runs: tuple[RunPlan, ...]
    commands: tuple[Command, ...]
    faults: tuple[Fault, ...]

    @property
    def heal_at(self) -> float:
        """When nothing is broken any more, and everybody is there."""
        return max([0.0, *(f.at + f.seconds for f in self.faults), *(w.joins_at for w in self.workers)])

    def without_fault(self, index: int) -> Scenario:
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])


# ---- as text


def dump(scenario: Scenario) -> str:
    """A line a fact: JSON, so that it can be read and cut by hand."""
    body = asdict(scenario)
    lines = [json.dumps({"seed": body["seed"], "coordinators": body["coordinators"]})]
    for kind in ("workers", "runs", "commands", "faults"):
        lines += [f"{kind[:-1]} {json.dumps(entry)}" for entry in body[kind]]
    return "\n".join(lines) + "\n"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def load(text: str) -> Scenario:
    head, *lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    first: dict[str, Any] = json.loads(head)
    found: dict[str, list[Any]] = {"worker": [], "run": [], "command": [], "fault": []}
    for line in lines:
        kind, _, body = line.partition(" ")
        found[kind].append({key: _tuples(value) for key, value in json.loads(body).items()})
    runs: list[RunPlan] = []
    for body in found["run"]:
        body["specs"] = tuple(ItemSpec(**{k: _tuples(v) for k, v in spec.items()}) for spec in body["specs"])
        body["items"] = tuple((Behaviour(**how), index) for how, index in body["items"])
        body["lanes"] = tuple(Lane(**lane) for lane in body["lanes"])
        body["policies"] = tuple(Policy(p["name"], _tuples(p["options"])) for p in body["policies"])
        runs.append(RunPlan(**body))
    return Scenario(
        first["seed"],
        tuple(WorkerPlan(**body) for body in found["worker"]),
        _tuples(first["coordinators"]),
        tuple(runs),
        tuple(Command(**body) for body in found["command"]),
        tuple(Fault(**body) for body in found["fault"]),
    )
