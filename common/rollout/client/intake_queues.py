"""The queues of a run: the one its rows arrive from, and the one its results go to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from rollout.model.errors import ConfigError, InputError, NotFoundError, RolloutError
from rollout.model.problems import problems
from rollout.queues import Place, Queue, open_queue
from rollout.workloads.arriving_rows import QueueInput


@dataclass(frozen=True, slots=True)
class Queues:
    """Open queues. If `output` is None, results only go to files."""

    input: Queue
    output: Queue | None

    def notes(self) -> Iterator[str]:
        """Yield notes for the user."""
        facts = self.input.facts
        if facts.ordered:
            yield (
                f"{facts.name} is a FIFO queue: rows are taken in its order, and a message group gives its next ones "
                "when those before are in the ledger"
            )
        if not facts.dead_letter:
            yield (
                f"the queue {facts.name} has no dead-letter queue: what cannot be taken comes again for as long as it "
                "is kept"
            )
        for queue in (self.input, self.output):
            if queue is not None:
                yield from queue.facts.remarks


@asynccontextmanager
async def opened(wanted: QueueInput) -> AsyncGenerator[Queues]:
    """Open the queues. Raises ConfigError if one does not exist or may not be used, or UnavailableError."""
    cloud = wanted.cloud
    places = {wanted.key: Place(cloud.intake, "input", cloud.lease_s)}
    if cloud.outlet:
        places[wanted.output_key] = Place(cloud.outlet, "output", cloud.lease_s)
    async with AsyncExitStack() as stack:
        queues: list[Queue] = []
        for place in places.values():
            queue = open_queue(cloud.queue_backend, place, cloud)
            stack.push_async_callback(queue.close)
            queues.append(queue)
        found = await asyncio.gather(*(queue.open() for queue in queues), return_exceptions=True)
        faults: list[RolloutError] = []
        for key, error in zip(places, found, strict=True):
            if isinstance(error, RolloutError):
                faults.append(_at(key, error))
            elif isinstance(error, BaseException):
                raise error
        if len(faults) == 1:
            raise faults[0]
        if faults:
            raise ConfigError(problems(fault.message for fault in faults))
        yield Queues(queues[0], queues[1] if len(queues) > 1 else None)


def _at(key: str, error: RolloutError) -> RolloutError:
    """Attribute an error to the key that names the queue, unless it names another."""
    if isinstance(error, ConfigError | InputError | NotFoundError) and not error.message.startswith("cloud."):
        section, _, name = key.rpartition(".")
        error.message = f"{key}: {error.message.removeprefix(f'[{section}] {name}: ')}"
    return error
