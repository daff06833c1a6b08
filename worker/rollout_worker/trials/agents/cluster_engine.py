"""`Place.ask`: generations by engines of this cluster. Each is a child of the trial's item, of executor `infer`, or of
`rollout` where a policy is trained (`policy_engine`).

A child's place is (the trial's item, ordinal), and a try at a trial finds there what the try before it asked. So an
item has an id by its place alone, and a tag by what was asked, which comes back with the result:

- the tag is ours: the answer, whichever try asked for it (the same question at the same place has the same seed, so it
  would be the same);
- another one: the try before went another way here. The next place is asked.

A child that failed has no tag. A try ends with it, so among the places of n tries before this one there are at most n
such; as many are passed over before a failure is taken for this try's own.
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
"""Turns of one trial begin alike, and go to one engine as far as it has room; specs of a run must be few."""

_TYPES = {
    "prompt_too_long": "agent_context_window_exceeded",
    "bad_request": "api_bad_request",
    "structured_output": "api_bad_request",
    "model_missing": "agent_model_not_found",
}
"""Types of what the engine cannot do. Everything else is a fault of the service's, and may pass."""


class Answered(Protocol):
    """A child's result, as executors see it."""

    @property
    def ordinal(self) -> int: ...

    @property
    def outcome(self) -> Outcome: ...

    @property
    def data(self) -> bytes: ...

    @property
    def failure(self) -> Failure | None: ...


class Parent(Protocol):
    """What an attempt's context lets it do with children."""

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True) -> None: ...

    def children(self, from_child: int = 0) -> AsyncIterator[Answered]: ...


class Tagged(Protocol):
    @property
    def tag(self) -> str: ...


T = TypeVar("T", bound=Tagged)


class Generations:
    """Of one try at one trial. `item`: id of the trial's item; `attempt`: which try at it, from 1; `spec`: of its
    children. One generation at a time: others wait."""

    def __init__(self, item: bytes, attempt: int, context: Parent, spec: ItemSpec) -> None:
        self._item = item
        self._context = context
        self._next = 0
        self._foreign_failures = attempt - 1
        self._results: AsyncIterator[Answered] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._spec = spec

    async def result(self, tag: str, payload: Callable[[int], bytes], decode: Callable[[bytes], T]) -> T:
        """`payload`: of the item at a place, with this tag. `decode` raises InputError. TrialFault."""
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
        """What came of the next place, where this is asked unless something was before."""
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
    """Of one try at one trial, as `Generations`. Tokens are counted in `usage`."""

    def __init__(self, item: bytes, attempt: int, context: Parent, usage: UsageCount, executor: str = EXECUTOR) -> None:
        spec = ItemSpec(executor=executor, affinity=f"trial-{item[0] % _AFFINITIES}" if item else "")
        self._generations = Generations(item, attempt, context, spec)
        self._usage = usage

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        """One answer. `sampling`: keys of `engine.sampling`, over those of the job. TrialFault."""
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
