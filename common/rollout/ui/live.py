"""Streams to browser tabs: each gets the changed sections of its page. Tabs on the same page share the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rollout.model.errors import RolloutError
from rollout.ui.cluster import Cluster
from rollout.ui.page import Page, render

EVERY_S = 1.0
"""Interval between two renderings of a page."""
STREAMS_MAX = 500
_BEAT_S = 15.0
"""Interval between messages of an idle stream, so that a closed tab is noticed."""
View = Callable[[], Awaitable[Page]]


@dataclass(slots=True)
class _Made:
    """A rendered page."""

    order: list[str] = field(default_factory=list[str])
    sections: dict[str, str] = field(default_factory=dict[str, str])
    trouble: str = ""
    over: bool = False


class _Channel:
    """A page with viewers."""

    def __init__(self, view: View, cluster: Cluster, link: Callable[..., str]) -> None:
        self._view, self._cluster, self._link = view, cluster, link
        self.made = _Made()
        self.changed = asyncio.Condition()
        self.version = 0
        self.readers = 0
        self.over = False
        self.task = asyncio.create_task(self._make())

    async def _make(self) -> None:
        try:
            await self._follow()
        finally:  # a fault of a view included: who reads must not wait for ever
            self.over = True
            async with self.changed:
                self.changed.notify_all()

    async def _follow(self) -> None:
        while not self.made.over:
            made = await self._now() if self._cluster.changes or not self.version else self.made
            if (made.order, made.sections, made.trouble, made.over) != (
                self.made.order, self.made.sections, self.made.trouble, self.made.over,
            ):  # fmt: skip
                async with self.changed:
                    self.made, self.version = made, self.version + 1
                    self.changed.notify_all()
            await asyncio.sleep(EVERY_S)

    async def _now(self) -> _Made:
        try:
            page = await self._view()
        except RolloutError as error:
            return _Made(self.made.order, self.made.sections, error.message)
        sections = {section.id: render(section, self._link) for section in page.sections}
        return _Made(list(sections), sections, self._cluster.trouble, over=not page.live)


class Live:
    """All channels. Call `close` at the end."""

    def __init__(self, cluster: Cluster, link: Callable[..., str]) -> None:
        self._cluster = cluster
        self._link = link
        self._channels: dict[str, _Channel] = {}
        self._streams = 0
        self._closed = asyncio.Event()

    async def end(self) -> None:
        """End every stream: a stopping server would wait for its readers."""
        self._closed.set()
        for channel in list(self._channels.values()):
            async with channel.changed:
                channel.changed.notify_all()

    async def close(self) -> None:
        await self.end()
        tasks = [channel.task for channel in self._channels.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def full(self) -> bool:
        return self._streams >= STREAMS_MAX

    async def stream(self, address: str, view: View) -> AsyncGenerator[str, None]:
        """Yield events for the browser until the page cannot change any more. A slow reader gets fewer events and
        delays nobody else."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = _Channel(view, self._cluster, self._link)
        channel.readers += 1
        self._streams += 1
        try:
            async for event in self._events(channel):
                yield event
        finally:
            self._streams -= 1
            channel.readers -= 1
            if not channel.readers:
                self._channels.pop(address, None)
                channel.task.cancel()
                with suppress(asyncio.CancelledError):
                    await channel.task

    async def _events(self, channel: _Channel) -> AsyncGenerator[str, None]:
        seen: dict[str, int] = {}
        version = 0
        while not self._closed.is_set():
            try:
                async with asyncio.timeout(_BEAT_S), channel.changed:
                    await channel.changed.wait_for(
                        lambda: channel.version != version or channel.over or self._closed.is_set()  # noqa: B023
                    )
            except TimeoutError:
                yield ": still here\n\n"
                continue
            if channel.version == version:
                return
            made, version = channel.made, channel.version
            fresh = {name: html for name, html in made.sections.items() if seen.get(name) != hash(html)}
            seen = {name: hash(html) for name, html in made.sections.items()}
            told = {"order": made.order, "sections": fresh, "trouble": made.trouble}
            yield f"event: change\ndata: {json.dumps(told)}\n\n"
            if made.over:
                yield "event: end\ndata: {}\n\n"
                return
