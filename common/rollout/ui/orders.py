"""Actions of a page. Each first says what it will do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout.cli.words import counted
from rollout.client import Runs
from rollout.model.ids import short
from rollout.wire.v1 import runs_pb2 as pb


@dataclass(frozen=True, slots=True)
class Order:
    verb: str
    what: Callable[[pb.RunStatus], str]

    async def give(self, client: Runs, run_id: str, reason: str) -> None:
        await client.command(run_id, self.verb, reason=reason)


def _named(status: pb.RunStatus) -> str:
    return f"run {status.spec.name or short(status.spec.run_id)}"


def _held(status: pb.RunStatus) -> str:
    return counted(status.running, "attempt")


ORDERS: dict[str, Order] = {
    "pause": Order(
        "pause",
        lambda status: (
            f"Pause {_named(status)}: nothing new begins. {_held(status)} that run now end first, or stop "
            "at the pause timeout. Resume goes on without loss."
        ),
    ),
    "resume": Order("resume", lambda status: f"Resume {_named(status)}: rows without a result run again."),
    "kill": Order(
        "kill",
        lambda status: (
            f"Kill {_named(status)}: {_held(status)} are stopped now, and nothing more begins. Results that "
            "are there stay; resume goes on with the rest."
        ),
    ),
}


def drain_text(worker: pb.WorkerStatus) -> str:
    return (
        f"Drain worker {short(worker.incarnation)} on {worker.inventory.host}: it takes nothing new, finishes "
        f"{counted(worker.running, 'attempt')} and stops. What it holds and has not begun goes to other workers."
    )
