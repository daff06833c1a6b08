"""Where attempts execute: a plan for each (run, executor), and for what an item asks of its own process. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import NamedTuple

from rollout.model.errors import AttemptError, ProtocolError
from rollout.model.ids import is_ulid
from rollout.model.item import Failure, ItemSpec, hosted
from rollout.wire.v1 import work_pb2

from rollout_worker.attempts import Plan, run_from_wire
from rollout_worker.executors.port import Executor, Run


class Plans:
    """Plans of the runs that this worker knows; `plan_run` raises AttemptError if one cannot execute here.

    `lease_devices` says whether this worker knows its accelerators; otherwise no process is given any, and it sees all.
    """

    def __init__(self, plan_run: Callable[[Run], Plan], *, lease_devices: bool) -> None:
        self._plan_run = plan_run
        self._lease_devices = lease_devices
        self._runs: dict[str, Run] = {}
        self._unreadable: dict[str, AttemptError] = {}  # why a run's configuration is
        self._plans: dict[str, dict[tuple[str, Limits], Plan]] = {}  # by run

    def of(self, context: work_pb2.RunContext, spec: ItemSpec) -> Plan:
        """Return the plan. Raises ProtocolError if a run is new and `context` does not describe it."""
        run = self._run(context)
        plans = self._plans.setdefault(context.run_id, {})
        key = (spec.executor, limits(spec))
        plan = plans.get(key)
        if plan is None:
            plan = self._make(run, *key)
            if not self._lease_devices:
                plan = replace(plan, devices=0)
            plans[key] = plan
        return plan

    def _make(self, run: Run, executor: str, asked: Limits) -> Plan:
        if asked != NO_LIMITS:
            plain = self._plans[run.run_id].get((executor, NO_LIMITS)) or self._make(run, executor, NO_LIMITS)
            return with_limits(plain, asked)
        try:
            if run.run_id in self._unreadable:
                raise self._unreadable[run.run_id]
            return self._plan_run(run.seen_by(executor))
        except AttemptError as error:
            return _refused(run, executor, error)

    def _run(self, context: work_pb2.RunContext) -> Run:
        known = self._runs.get(context.run_id)
        if known is not None and not context.workload:
            return known
        if not is_ulid(context.run_id):
            raise ProtocolError(f"an assignment of run {context.run_id!r}, which is no run id")
        if not context.workload:
            raise ProtocolError(f"an assignment of run {context.run_id}, whose configuration was never sent")
        try:
            run = run_from_wire(context)
        except AttemptError as error:
            run = Run(context.run_id, context.workload, {}, context.name)
            self._unreadable[context.run_id] = error
        if known is not None and known.config == run.config:
            return known
        self._plans.pop(context.run_id, None)  # those of a run that goes on with other settings
        self._runs[context.run_id] = run
        return run

    def forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        self._unreadable.pop(run_id, None)
        self._plans.pop(run_id, None)

    def forget_unused(self, used: Set[str]) -> list[str]:
        """Forget, and return, all but `used`; a new stream sends the configuration of a continuing run again."""
        unused = [run_id for run_id in self._runs if run_id not in used]
        for run_id in unused:
            self.forget(run_id)
        return unused


class Limits(NamedTuple):
    """Limits that an item asks for its process."""

    devices: int = 0
    memory_mib: int = 0


NO_LIMITS = Limits()


def limits(spec: ItemSpec) -> Limits:
    asked = dict(spec.resources)
    return Limits(math.ceil(asked.get("gpus", 0.0)), math.ceil(asked.get("memory_mib", 0.0)))


def with_limits(plan: Plan, asked: Limits) -> Plan:
    """Return the plan with an item's limits for a slot, which it has to itself; a shared engine has its executor's
    limits."""
    if plan.kind != "slot":
        return plan
    key = f"{plan.key} gpus={asked.devices} memory_mib={asked.memory_mib}"
    return replace(plan, key=key, devices=asked.devices, memory_mib=asked.memory_mib)


def planner(executors: Mapping[str, type[Executor]]) -> Callable[[Run], Plan]:
    """Return a function from a run to its plan for `run.executor`, as these executors declare."""

    def plan(run: Run) -> Plan:
        executor = executors.get(hosted(run.executor))
        if executor is None:
            raise AttemptError(
                f"this worker has no executor {run.executor!r} (it has: {', '.join(executors) or 'none'})",
                code="executor_missing",
            )
        try:
            environment = tuple(sorted(executor.environment(run).items()))
            engine = executor.engine_key(run)
            wants: Callable[[Run], int] | None = getattr(executor, "devices", None)
            devices = wants(run) if wants is not None else 0
            copies: Callable[[Run], int] | None = getattr(executor, "replicas", None)
            replicas = copies(run) if copies is not None else 1
            sharing: Callable[[Run], bool] | None = getattr(executor, "shares_devices", None)
            shares = sharing is not None and sharing(run)
        except Exception as error:
            raise AttemptError(
                f"executor {run.executor!r} cannot read the run's configuration: {type(error).__name__}: {error}",
                code="bad_run_config",
            ) from error
        # Variables are read at import: another value needs another process.
        key = json.dumps([run.executor, executor.placement, engine, environment])
        if executor.placement != "engine":
            return Plan(run, executor.placement, key, environment)
        return Plan(run, executor.placement, key, environment, devices, replicas, shares)

    return plan


def _refused(run: Run, executor: str, error: AttemptError) -> Plan:
    """Return a plan that fails at once: neither the run's configuration nor this worker's executors will change."""
    here = Run(run.run_id, run.workload, {}, run.name, executor)
    failure = Failure(error.error_code, error.message, retryable=False)
    return Plan(here, "slot", json.dumps(["refused", run.run_id, here.executor]), refusal=failure)
