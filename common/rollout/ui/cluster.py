"""A cluster as the live page reads it: each question is asked once for all viewers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollout.cli.asking import OwnerEndedError, reached
from rollout.client.private import address_of
from rollout.client.target import Target
from rollout.model.errors import RolloutError, UnavailableError

if TYPE_CHECKING:
    from rollout.client import Runs

FRESH_S = 1.0
"""For how many seconds an answer is shared with everyone who asks the same."""
PATIENCE_S = 10.0
"""How long to wait for an answer: longer than a failover."""
_KEPT = 256
_LOOK_S = 0.5
_REST_S = 1.0
"""How long after the last question the coordinator of an idle private cluster is stopped, since its own command needs
the directory."""
Answer = TypeVar("Answer")
Question = Callable[["Runs"], Awaitable[Answer]]


@dataclass(slots=True)
class _Answer:
    asked: float
    """Time of the question by the loop's clock, in seconds."""
    reply: asyncio.Task[Any]
    last: Any = None
    """The previous answer, shown while the cluster does not respond."""
    known: bool = field(default=False)


class Cluster:
    """A cluster, for `async with`. Without questions it keeps no connection to an idle private cluster."""

    def __init__(self, target: Target, tell: Callable[[str], None]) -> None:
        self._target = target
        self._tell = tell
        self._answers: OrderedDict[tuple[Any, ...], _Answer] = OrderedDict()
        self._client: asyncio.Future[Runs] | None = None
        self._asked = 0.0
        self._asking = 0
        self._attached: asyncio.Task[None] | None = None
        self.trouble = ""
        """Why the data shown may be old, or ""."""
        self.at_rest = False
        """Whether it is a private cluster without a running command, in which nothing changes."""

    @property
    def name(self) -> str:
        return str(self._target.private.parent) if self._target.private is not None else self._target.cluster

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        for answer in self._answers.values():
            answer.reply.cancel()
        if self._attached is not None:
            self._attached.cancel()
            with suppress(asyncio.CancelledError):
                await self._attached

    async def shared(self, key: tuple[Any, ...], question: Question[Answer], fresh_s: float = FRESH_S) -> Answer:
        """Return the answer to the question named `key`, asked at most once in `fresh_s`. While nobody responds, return
        the previous one; raises RolloutError if there is none."""
        now = asyncio.get_running_loop().time()
        answer = self._answers.get(key)
        if answer is None or (answer.reply.done() and now - answer.asked >= fresh_s):
            asked = _Answer(now, asyncio.create_task(self.ask(question)))
            if answer is not None:
                asked.last, asked.known = answer.last, answer.known
            answer = self._answers[key] = asked
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)[1].reply.cancel()
        self._answers.move_to_end(key)
        try:
            found = await asyncio.shield(answer.reply)
        except UnavailableError:
            if not answer.known:
                raise
            return cast(Answer, answer.last)
        answer.last, answer.known = found, True
        return found

    async def ask(self, question: Question[Answer]) -> Answer:
        """Ask now, for one viewer. Raises RolloutError."""
        loop = asyncio.get_running_loop()
        while True:
            self._asking += 1
            try:
                found = await question(await self._attach())
            except UnavailableError as error:
                if self._client is None:  # the command of a private cluster has ended meanwhile
                    continue
                self.trouble = error.message
                raise
            finally:
                self._asking -= 1
                self._asked = loop.time()
            self.trouble = ""
            return found

    async def _attach(self) -> Runs:
        if self._client is None:
            self._client = asyncio.get_running_loop().create_future()
            self._attached = asyncio.create_task(self._stay(self._client))
        return await asyncio.shield(self._client)

    async def _stay(self, attached: asyncio.Future[Runs]) -> None:
        """Stay connected as long as that is useful."""
        try:
            async with self._reached() as (client, idle):
                self.at_rest = idle
                attached.set_result(client)
                while self._is_wanted():  # noqa: ASYNC110 - the owner of a private cluster ends without a word
                    await asyncio.sleep(_LOOK_S)
        except OwnerEndedError:
            pass
        except RolloutError as error:
            if not attached.done():
                attached.set_exception(error)
        finally:
            self._client = None
            if not attached.done():
                attached.cancel()

    def _is_wanted(self) -> bool:
        rested = asyncio.get_running_loop().time() - self._asked
        return not self.at_rest or bool(self._asking) or rested < _REST_S

    @asynccontextmanager
    async def _reached(self) -> AsyncGenerator[tuple[Runs, bool], None]:
        async with reached(self._target, self._tell, patience_s=PATIENCE_S) as (client, idle):
            yield client, idle

    @property
    def changes(self) -> bool:
        """Whether the data may change: it is not an idle private cluster."""
        private = self._target.private
        return private is None or not self.at_rest or bool(address_of(private))
