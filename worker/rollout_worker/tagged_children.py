"""Questions of an attempt as child items, which another attempt at the same item finds again.

(item, ordinal) identifies a child, and an attempt finds there what the attempt before it asked. A child therefore has
an id by its place alone, and a tag for what was asked, which is returned with the result:

- the tag is ours: this is the answer, whichever attempt asked for it;
- the tag differs: the earlier attempt took another path. The next place is tried.

A failed child has no tag, but an attempt ends with it. So n attempts that failed or were lost leave at most n failed
children, and as many are skipped before a failure counts as this attempt's own. A stolen attempt does not count: what
failed then failed for the same question.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from blake3 import blake3
from rollout.model.item import Failure, ItemSpec, NewItem, Outcome

T = TypeVar("T")


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
    """Part of an attempt's context that handles children."""

    async def spawn(self, items: Sequence[NewItem], *, first_ordinal: int = 0, seal: bool = True) -> None: ...

    def children(self, from_child: int = 0) -> AsyncIterator[Answered]: ...


class NoAnswerError(Exception):
    """There is no answer. `code` is that of the child's failure, its state, or `cancelled` if the item was closed
    meanwhile."""

    def __init__(self, code: str, message: str, *, failed: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.failed = code, message, failed


class TaggedChildren:
    """Questions of one attempt at the item `item`, one at a time; others wait.

    `kind` is the kind of question, which is part of ids; `spec` is that of the children; `first` is the ordinal of the
    first; `foreign_failures` is the number of failed children that may be an earlier attempt's.
    """

    def __init__(
        self, kind: bytes, item: bytes, context: Parent, spec: ItemSpec, *, foreign_failures: int, first: int = 0
    ) -> None:
        self._prefix = kind + item
        self._context = context
        self._spec = spec
        self._next = first
        self._foreign_failures = foreign_failures
        self._results: AsyncIterator[Answered] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, tag: str, payload: Callable[[int], bytes], decode: Callable[[bytes], tuple[str, T]]) -> T:
        """Return the answer. Raises NoAnswerError.

        `payload` returns that of the item at a place, with this tag; `decode` returns (tag, result).
        """
        async with self._one_at_a_time:
            while True:
                child = await self._child(payload(self._next))
                failure, failed = child.failure, child.outcome is Outcome.FAILED
                if child.outcome is Outcome.DONE and failure is None:
                    found, result = decode(child.data)
                    if found == tag:
                        return result
                elif failed and self._foreign_failures:
                    self._foreign_failures -= 1
                elif failed and failure is not None:
                    raise NoAnswerError(failure.code, failure.message, failed=True)
                else:
                    raise NoAnswerError(child.outcome.name.lower(), "")

    async def _child(self, payload: bytes) -> Answered:
        """Return the result of the next place, where this is asked unless something was asked before."""
        place = self._next
        identity = blake3(self._prefix + place.to_bytes(8, "big")).digest()
        await self._context.spawn([NewItem(identity, payload, self._spec)], first_ordinal=place, seal=False)
        if self._results is None:
            self._results = self._context.children(place)
        try:
            child = await anext(self._results)
        except asyncio.CancelledError:
            self._results = None  # it ended with this; the place is read again, should anything be asked later
            raise
        except StopAsyncIteration:
            raise NoAnswerError("cancelled", "the item was closed while it waited for an answer") from None
        self._next += 1
        return child
