"""Source of a run's units: an input that was read, or a queue for as long as rows come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rollout.cli.progress import Display, eta
from rollout.cli.words import of_unit
from rollout.cli.work import Work
from rollout.client.intake import Intake, Items
from rollout.client.intake_queues import Queues
from rollout.client.publish import Publisher
from rollout.client.run_session import RunSession
from rollout.client.runs import Runs
from rollout.model.errors import InputChangedError
from rollout.model.ids import short
from rollout.model.item import NewItem
from rollout.model.run import RunSpec
from rollout.wire.v1 import runs_pb2 as pb
from rollout.workloads.json_form import JsonObject
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import Checked, Workload


class InputRows:
    """Units of the whole checked input."""

    open_ended = False
    """Whether the number of units is not known before the last has come."""

    def __init__(self, workload: Workload[Any, Any], checked: Checked, config: JsonObject) -> None:
        self._workload = workload
        self._checked = checked
        self._config = config

    def total(self, submitted: int) -> int:
        """Return the number of units; if more may come, the number so far."""
        return self._checked.total

    def opening(self, status: pb.RunStatus, *, resumed: bool) -> str:
        """Return the message about the opened run."""
        total = of_unit(self.total(status.submitted), self._workload.unit)
        if self._checked.may_be_fewer:
            total = f"at most {total}"
        return f"going on, {status.done + status.failed} of {total} have their result" if resumed else total

    async def submit(self, session: RunSession, spec: RunSpec) -> None:
        """Submit units until all are durable."""
        await session.submit(spec, self._items)

    def _items(self, start: int) -> Iterator[NewItem]:
        """Yield as many units as the check counted: a run must not be sealed with another number."""
        count, total = start, self._checked.total
        for item in self._workload.plan(self._checked, self._config, start):
            count += 1
            if count > total:
                break
            yield item
        if count != total:
            more = "more" if count > total else f"only {count}"
            had = of_unit(total, self._workload.unit)
            raise InputChangedError(
                f"the input changed while it was read: it had {had} when it was checked, and now has {more}. "
                "Put it back as it was and run the same command again"
            )

    def drain(self, session: RunSession, status: pb.RunStatus | None, display: Display) -> bool:
        """Accept no more units; the run ends with those it has. Returns False if none come anyway."""
        return False

    def leave(self, why: str, display: Display) -> None:
        """Accept no more units, because another command may resume the run."""

    def committed(self, cursor: int) -> None:
        """Record that the first `cursor` units have their result."""

    def observe(self, status: pb.RunStatus, final: int, per_s: float) -> None:
        """Record that `final` units have a result, and `per_s` get one per second."""

    def is_waiting(self, status: pb.RunStatus, final: int) -> bool:
        """Return whether the run has nothing to do until more units come."""
        return False

    def progress(self, left: int, per_s: float, workers: int, state: str) -> dict[str, Any]:
        """Return the fields of the displayed progress. `left` is in the unit of the count."""
        return {"eta_s": eta(left, per_s, workers=workers, state=state)}


class QueueRows(InputRows):
    """Units that `intake` takes from a queue."""

    open_ended = True

    def __init__(self, workload: Workload[Any, Any], checked: Checked, config: JsonObject, intake: Intake) -> None:
        super().__init__(workload, checked, config)
        self._intake = intake

    def total(self, submitted: int) -> int:
        return max(submitted, self._intake.taken)

    def opening(self, status: pb.RunStatus, *, resumed: bool) -> str:
        unit, done = self._workload.unit, status.done + status.failed
        total = of_unit(self.total(status.submitted), unit)
        if status.sealed:
            return f"its intake has ended; {done} of the {total} that came have their result"
        so_far = f"going on, {done} of the {total} that came so far have their result; " if resumed else ""
        return f"{so_far}takes {unit} from the queue {self._intake.source}"

    async def submit(self, session: RunSession, spec: RunSpec) -> None:
        async def submit(items: Items, settle: Callable[[int], None]) -> int:
            return await session.submit(spec, items, settle)

        session.submitted = max(session.submitted, await self._intake.run(submit))

    def drain(self, session: RunSession, status: pb.RunStatus | None, display: Display) -> bool:
        unit, left = self._workload.unit, session.submitted
        if status is not None:
            there = max(left, status.submitted)
            left = max(0, there - status.done - status.failed - status.cancelled - status.skipped)
        are = "is" if left == 1 else "are"
        doing = f"the {of_unit(left, unit)} that {are} in the run {are} being finished" if left else "the run ends"
        if status is not None and status.state != "running":
            doing = f"the run is {status.state}: `rollout run resume {short(session.run_id)}` finishes what is in it"
        display.event(
            "draining",
            f"no further message is taken, those that were received ahead are given back, and {doing}. Ctrl-C once "
            "more leaves at once: the same command goes on with them",
            unfinished=left,
        )
        self._intake.drain()
        return True

    def leave(self, why: str, display: Display) -> None:
        if not self._intake.draining:
            display.note(f"warning: {why}: the intake ends")
            self._intake.drain()

    def committed(self, cursor: int) -> None:
        self._intake.committed(cursor)

    def observe(self, status: pb.RunStatus, final: int, per_s: float) -> None:
        self._intake.observe(final=final, running=status.running, per_s=per_s, active=status.state == "running")

    def is_waiting(self, status: pb.RunStatus, final: int) -> bool:
        return final >= status.submitted

    def progress(self, left: int, per_s: float, workers: int, state: str) -> dict[str, Any]:
        return {"eta_s": None, "intake": self._intake.state, "waiting": self._intake.depth}


def rows_of(
    work: Work,
    place: OutputPlace,
    checked: Checked,
    config: JsonObject,
    queues: Queues | None,
    runs: Runs,
    run_id: str,
) -> InputRows:
    """Return the units of a run: from the input, or from `queues`."""
    if checked.queue is None or queues is None:
        return InputRows(work.workload, checked, config)
    intake = Intake(
        queues.input,
        runs,
        run_id,
        work.workload.item_factory(checked, config),
        skip=checked.queue.skip,
        lease_s=checked.queue.cloud.lease_s,
        stop_when_empty_s=checked.queue.stop_when_empty_s,
        directory=place.directory,
        tell=work.display.note,
    )
    return QueueRows(work.workload, checked, config, intake)


def publisher_of(
    work: Work, place: OutputPlace, config: JsonObject, queues: Queues | None, runs: Runs, run_id: str
) -> Publisher | None:
    """Return the publisher that also sends results to a queue, if `queues` has one for them."""
    if queues is None or queues.output is None:
        return None
    lines, tell = work.workload.writer(config).lines, work.display.note
    return Publisher(queues.output, runs, run_id, lines, directory=place.directory, where=place.shown, tell=tell)
