"""`Place.ask`: generations by engines of this cluster. Each is a child of the trial's item, of executor `infer`, or of
`rollout` if a policy is trained (`policy_engine`).

A child's place is (the trial's item, ordinal), and a try at a trial finds there what the try before it asked. So an
item has an id by its place alone, and a tag by the question, which is returned with the result:

- our tag: the result is the answer, whichever try asked for it (the same question at the same place has the same seed,
so the answer would be the same);
- another tag: an earlier try took another path here. The next place is asked.

A child that failed has no tag. A try ends with it, so among the places of n earlier tries there are at most n such; as
many are skipped before a failure is taken for this try's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from blake3 import blake3
from rollout.model.errors import InputError
from rollout.model.item import Failure, ItemSpec, NewItem, Outcome
from rollout.workloads.infer.payload import Payload, decode_result, encode_payload
from rollout.workloads.json_form import canonical

from rollout_worker.trials.port import Reply, TrialFault, UsageCount

EXECUTOR = "infer"
_AFFINITIES = 64
"""Turns of one trial share a prefix, and go to one engine if it has room; the specs of a run must be few."""

_TYPES = {
    "prompt_too_long": "agent_context_window_exceeded",
    "bad_request": "api_bad_request",
    "structured_output": "api_bad_request",
    "model_missing": "agent_model_not_found",
}
"""Types of error for what the engine cannot do. Everything else is the service's fault, and may pass."""


class Answered(Protocol):
    """A child's result as executors see it."""

    @property
    def ordinal(self) -> int: ...

    @property
    def outcome(self) -> Outcome: ...

    @property
    def data(self) -> bytes: ...

    @property
    def failure(self) -> Failure | None: ...


class Parent(Protocol):
    """The methods of an attempt's context that concern children."""

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True) -> None: ...

    def children(self, from_child: int = 0) -> AsyncIterator[Answered]: ...


class Tagged(Protocol):
    @property
    def tag(self) -> str: ...


T = TypeVar("T", bound=Tagged)


class Generations:
    """The generations of one try at one trial, one at a time. `item` is the id of the trial's item, `attempt` the
    number of the try, from 1, and `spec` that of its children."""

    def __init__(self, item: bytes, attempt: int, context: Parent, spec: ItemSpec) -> None:
        self._item = item
        self._context = context
        self._next = 0
        self._foreign_failures = attempt - 1
        self._results: AsyncIterator[Answered] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._spec = spec

    async def result(self, tag: str, payload: Callable[[int], bytes], decode: Callable[[bytes], T]) -> T:
        """Return a decoded result. `payload` makes the item for a place, with this tag. `decode` raises InputError.
        Raises TrialFault."""
        async with self._one_at_a_time:
            while True:
                child = await self._child(payload(self._next))
                if child.failure is not None or child.outcome is not Outcome.DONE:
                    if child.outcome is Outcome.FAILED and self._foreign_failures:
                        self._foreign_failures -= 1
                        continue
                    raise _fault(child)
                try:
                    result = decode(child.data)
                except InputError as error:
                    raise TrialFault("internal_error", error.message) from error
                if result.tag == tag:
                    return result

    async def _child(self, payload: bytes) -> Answered:
        """Return the result of the next place, asking unless an earlier try did."""
        place = self._next
        identity = blake3(b"\x02generation" + self._item + place.to_bytes(8, "big")).digest()
        await self._context.spawn([NewItem(identity, payload, self._spec)], first_ordinal=place, seal=False)
        if self._results is None:
            self._results = self._context.children(place)
        try:
            child = await anext(self._results)
        except asyncio.CancelledError:
            self._results = None  # it ended with this; the place is read again, should anything be asked later
            raise
        except StopAsyncIteration:
            raise TrialFault("cancelled", "the trial's item was closed while it waited for an answer") from None
        self._next += 1
        return child


class ClusterEngine:
    """The engine of one try at one trial, made with its `Generations`. Tokens are counted in `usage`."""

    def __init__(self, item: bytes, attempt: int, context: Parent, usage: UsageCount, executor: str = EXECUTOR) -> None:
        spec = ItemSpec(executor=executor, affinity=f"trial-{item[0] % _AFFINITIES}" if item else "")
        self._generations = Generations(item, attempt, context, spec)
        self._usage = usage

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        """Return an answer. `sampling` has keys of `engine.sampling`, which override the job's. Raises TrialFault."""
        row = {"messages": [dict(message) for message in messages], "sampling": sampling}
        tag = blake3(canonical(row)).hexdigest()[:32]

        def payload(place: int) -> bytes:
            return encode_payload(Payload(row, place, "", 0, tag))

        result = await self._generations.result(tag, payload, decode_result)
        choice = result.choices[0]
        self._usage.input_tokens += result.prompt_tokens
        self._usage.output_tokens += choice.tokens
        return Reply(choice.text, choice.finish_reason, result.prompt_tokens, choice.tokens)


def _fault(child: Answered) -> TrialFault:
    failure = child.failure
    if child.outcome is not Outcome.FAILED or failure is None:
        return TrialFault("cancelled", f"the generation was {child.outcome.name.lower()}")
    return TrialFault(_TYPES.get(failure.code, "api_unreachable"), f"the engine: {failure.message} ({failure.code})")
