"""One question to a cluster: finds the cluster, waits for it, and returns its answer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rollout.cli.options import choose_cluster, chosen
from rollout.cli.waits import Waits
from rollout.client.private import OwnerLock, address_of
from rollout.client.target import Target, connected, need_target
from rollout.model.errors import UnavailableError

if TYPE_CHECKING:
    from rollout.client import Runs

Answer = TypeVar("Answer")
Refusal = Callable[["Runs", Path], Awaitable[None]]
AtRest = Callable[["Runs", Path], Awaitable[Answer]]
"""Function that answers from a private cluster at rest; it is given the cluster's state directory."""
PATIENCE_S = 10.0
"""Seconds to wait for an answer; a failover takes less."""
_OWNER_POLL_S = 0.1
_ENDED_POLL_S = 0.5


def ask(
    coordinator: list[str] | None,
    tls_dir: Path | None,
    question: Callable[[Runs], Awaitable[Answer]],
    *,
    patience_s: float = PATIENCE_S,
    unless_idle: Refusal | None = None,
    at_rest: AtRest[Answer] | None = None,
) -> Answer:
    """Return the answer of the cluster that the command's options name (`client.target`).

    If nobody runs a private cluster, its coordinator is started for the time of the answer. In that case `unless_idle`
    is asked first; it raises an error if the question has no use while nobody works. `at_rest`, if given, is asked in
    place of a question whose answer differs at rest, or that waits for more: waiting would keep the run's own command
    out for as long. If the command that runs the private cluster ends before it has answered, the question is asked
    again.
    """
    choose_cluster(coordinator, tls_dir)
    target = need_target(coordinator, tls_dir, chosen().selector)
    if target.private is not None:
        tell(f"using {target}")

    async def asking() -> Answer:
        while True:
            with suppress(OwnerEndedError):
                async with reached(target, tell, patience_s=patience_s, unless_idle=unless_idle) as (client, idle):
                    if not idle or at_rest is None:
                        return await question(client)
                    assert target.private is not None
                    return await at_rest(client, target.private)

    return asyncio.run(asking())


class OwnerEndedError(UnavailableError):
    """The command that runs the private cluster has ended."""


@asynccontextmanager
async def reached(
    target: Target, tell: Callable[[str], None], *, patience_s: float, unless_idle: Refusal | None = None
) -> AsyncGenerator[tuple[Runs, bool], None]:
    """Yield a client of `target`, and whether `target` is a private cluster at rest.

    `tell` is told what is waited for, and which cluster answered. Raises OwnerEndedError.
    """
    if target.private is None:
        with Waits(tell, target.asked, lambda: tell(f"using {target}")) as waits:
            async with connected(
                target, patience_s=patience_s, on_trouble=waits.trouble, on_answer=waits.answered
            ) as client:
                yield client, False
        return
    with Waits(tell) as waits:
        async with _running(target.private, tell) as (address, idle):
            here = Target([address], target.private / "tls", "rollout", explicit=True)
            async with connected(here, patience_s=patience_s, on_trouble=waits.trouble) as client:
                if idle and unless_idle is not None:
                    await unless_idle(client, target.private)
                yield client, idle


@asynccontextmanager
async def _running(state: Path, tell: Callable[[str], None]) -> AsyncGenerator[tuple[str, bool], None]:
    """Yield the address of the private cluster's coordinator: its owner's, or (True) one that only answers
    questions."""
    lock = OwnerLock(state)
    while not lock.try_acquire():
        if address := address_of(state):
            async with _while_it_is_owned(lock):
                yield address, False
            return
        # It starts, or another command looks at the same directory: neither takes long.
        await asyncio.sleep(_OWNER_POLL_S)
    try:
        tell("no command works there at present; starting its coordinator for the answer")
        from rollout.client.embedded import Embedded

        embedded = Embedded(state, workers=0, report=tell, lock=lock)
        try:
            await embedded.start()
            yield embedded.address, True
        finally:
            await asyncio.shield(embedded.stop())
    finally:
        lock.release()


@asynccontextmanager
async def _while_it_is_owned(lock: OwnerLock) -> AsyncGenerator[None, None]:
    """Cut the body off with OwnerEndedError when nobody holds `lock` any more."""
    cut = asyncio.timeout(None)
    try:
        async with cut:
            watching = asyncio.create_task(_cut_off(lock, cut))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not cut.expired():
            raise
        raise OwnerEndedError from None


async def _cut_off(lock: OwnerLock, cut: asyncio.Timeout) -> None:
    while True:
        await asyncio.sleep(_ENDED_POLL_S)
        if lock.try_acquire():
            lock.release()
            cut.reschedule(asyncio.get_running_loop().time())
            return


def tell_all_is_said() -> None:
    """Say that a private cluster is at rest, where a command would otherwise have followed the run."""
    tell("nobody works there, so this is all")


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return `tell` without repetitions, for several clusters, or for one that is asked again."""
    said: set[str] = set()

    def telling(text: str) -> None:
        if text not in said:
            said.add(text)
            tell(text)

    return telling


def tell(text: str) -> None:
    """Print a message for the user beside the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
