"""`Place.ask`: generations by engines of this cluster. Each is a child of the trial's item (`tagged_children`), of
executor `infer`, or of `rollout` where a policy is trained (`policy_engine`). The same question at the same place has
the same seed, so its answer is the same whichever try asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from blake3 import blake3
from rollout.model.errors import InputError
from rollout.model.item import ItemSpec
from rollout.workloads.infer.payload import Payload, decode_result, encode_payload
from rollout.workloads.json_form import canonical

from rollout_worker.tagged_children import NoAnswerError, Parent, TaggedChildren
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


class Tagged(Protocol):
    @property
    def tag(self) -> str: ...


T = TypeVar("T", bound=Tagged)


class Generations:
    """The generations of one try at one trial, one at a time. `item` is the id of the trial's item, `attempt` the
    number of the try, from 1, and `spec` that of its children."""

    def __init__(self, item: bytes, attempt: int, context: Parent, spec: ItemSpec) -> None:
        self._children = TaggedChildren(b"\x02generation", item, context, spec, foreign_failures=attempt - 1)

    async def result(self, tag: str, payload: Callable[[int], bytes], decode: Callable[[bytes], T]) -> T:
        """Return a decoded result. `payload` makes the item for a place, with this tag. `decode` raises InputError.
        Raises TrialFault."""

        def tagged(data: bytes) -> tuple[str, T]:
            found = decode(data)
            return found.tag, found

        try:
            return await self._children.answer(tag, payload, tagged)
        except InputError as error:
            raise TrialFault("internal_error", error.message) from error
        except NoAnswerError as error:
            if error.failed:
                kind = _TYPES.get(error.code, "api_unreachable")
                raise TrialFault(kind, f"the engine: {error.message} ({error.code})") from error
            raise TrialFault("cancelled", error.message or f"the generation was {error.code}") from error


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
