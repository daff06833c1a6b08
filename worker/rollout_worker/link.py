"""Channel to the leading coordinator: found by trying, followed by hints, rebuilt with each certificate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio
import structlog
from rollout.model.address import parse_address
from rollout.model.errors import NotLeaderError, RolloutError, UnavailableError
from rollout.security.credentials import Credentials
from rollout.wire.channel import open_channel
from rollout.wire.errors import error_of

log = structlog.get_logger()

EOF: Any = cast(Any, grpc.aio).EOF  # what reading a stream past its end gives
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 2.0
CLOSE_GRACE_S = 2.0


class Link:
    """Link to the leader. `channel` is the present one; `changed` is set and replaced whenever there is another."""

    def __init__(
        self,
        addresses: list[str],
        credentials: Credentials,
        dial: Callable[[str, Credentials], Any] = open_channel,
        jitter: Callable[[float, float], float] = random.uniform,
        on_addresses: Callable[[list[str]], None] | None = None,
    ) -> None:
        self.addresses = list(dict.fromkeys(addresses))
        self._credentials = credentials
        self._dial = dial  # a simulation brings its own, and its own jitter
        self._jitter = jitter
        self._on_addresses = on_addresses
        self._told: tuple[str, ...] = ()
        self._address = self.addresses[0]
        self._pause = BACKOFF_FIRST_S
        self._round = 0
        self._closing: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        self.channel = dial(self._address, credentials)

    @property
    def address(self) -> str:
        return self._address

    @property
    def host(self) -> str:
        return parse_address(self._address).host

    def learn(self, told: tuple[str, ...]) -> None:
        """Record every coordinator of the cluster, as they report it; `on_addresses` is called on a change."""
        if not told or told == self._told:
            return
        self._told = told
        self.addresses += [address for address in told if address not in self.addresses]
        if self._on_addresses is not None:
            self._on_addresses(list(told))

    def succeeded(self) -> None:
        self._pause = BACKOFF_FIRST_S
        self._round = 0

    async def failed(self, error: RolloutError) -> None:
        """Switch to the leader that the error names, else to the next coordinator; return when it is time to try."""
        hint = str(error.context.get("leader", "")) if isinstance(error, NotLeaderError) else ""
        log.debug("coordinator_unavailable", addr=self._address, error=error.message, hint=hint)
        self._round += 1
        at_once = False
        if hint and hint != self._address:
            at_once = self._round <= 2  # a stale hint may point in a circle
            if hint not in self.addresses:
                self.addresses.append(hint)
            self._address = hint
        else:
            at = self.addresses.index(self._address)
            self._address = self.addresses[(at + 1) % len(self.addresses)]
            at_once = self._round < len(self.addresses)
        if not at_once:
            # Jitter, so that a dead leader's workers do not all meet again at the next one.
            await asyncio.sleep(self._pause * self._jitter(0.5, 1.0))
            self._pause = min(self._pause * 2, BACKOFF_MAX_S)
        self.rebuild()

    def rebuild(self) -> None:
        """Open a channel with the newest certificate. Calls on the old one have a moment to end."""
        old = self.channel
        self.channel = self._dial(self._address, self._credentials)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        task = asyncio.get_running_loop().create_task(old.close(grace=CLOSE_GRACE_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        await self.channel.close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=2 * CLOSE_GRACE_S)


def told_to_stop() -> bool:
    """Return whether a CancelledError is meant for this task; grpc.aio also raises it if only the call was
    cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def typed(error: grpc.aio.AioRpcError | grpc.aio.UsageError | asyncio.CancelledError) -> RolloutError:
    if isinstance(error, grpc.aio.AioRpcError):
        return error_of(error)
    return UnavailableError(f"the channel was closed: {error}")
