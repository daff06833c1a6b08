"""Where the attempts of each run execute. Pure, as the session is."""

from __future__ import annotations

from collections.abc import Callable, Set

from rollout.model.errors import AttemptError, ProtocolError
from rollout.model.ids import is_ulid
from rollout.model.item import Failure
from rollout.wire.v1 import work_pb2

from rollout_worker.attempts import Plan, run_from_wire
from rollout_worker.executors.port import Run


class Plans:
    """Of the runs that this worker was told of; `plan_run` raises AttemptError where one cannot run here."""

    def __init__(self, plan_run: Callable[[Run], Plan]) -> None:
        self._plan_run = plan_run
        self._plans: dict[str, Plan | Failure] = {}

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._plans

    def of(self, context: work_pb2.RunContext) -> Plan | Failure:
        """ProtocolError where a run is new and `context` does not say what it is."""
        known = self._plans.get(context.run_id)
        if known is not None:
            return known
        if not is_ulid(context.run_id):
            raise ProtocolError(f"an assignment of run {context.run_id!r}, which is no run id")
        if not context.workload:
            raise ProtocolError(f"an assignment of run {context.run_id}, whose configuration was never sent")
        try:
            plan: Plan | Failure = self._plan_run(run_from_wire(context))
        except AttemptError as error:
            plan = Failure(error.error_code, error.message, error.retry)
        self._plans[context.run_id] = plan
        return plan

    def forget(self, run_id: str) -> None:
        self._plans.pop(run_id, None)

    def forget_unused(self, used: Set[str]) -> list[str]:
        """All but those, which it returns: of a run that goes on, the configuration comes again with a new stream."""
        unused = [run_id for run_id in self._plans if run_id not in used]
        for run_id in unused:
            del self._plans[run_id]
        return unused
