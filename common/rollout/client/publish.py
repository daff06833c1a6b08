"""Sends each result of a run to the output queue as well, in the order of the commit log, at least once.

It reads the commit log by itself, from its last position, so an unavailable queue delays nothing and fills no memory. A
result is sent after it is in the files. Duplicates have the same deduplication id: run id and seq.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

from rollout.client.beside import Beside
from rollout.client.runs import Page
from rollout.model.errors import ConfigError, InputError, RolloutError, UnavailableError
from rollout.queues.port import Outgoing, Queue
from rollout.workloads.commit import CommitEntry
from rollout.workloads.invalid_result import Lines, lines_of
from rollout.workloads.output import seal, unseal, write_atomically

NAME = ".published.json"
AT_ONCE = 100
PAUSE_S = (1.0, 30.0)
TELL_AGAIN_S = 60.0
SAVE_EVERY_S = 1.0
FINISH_S = 60.0
"""At the end of a run, an output queue that takes nothing for this long is given up."""


class CommitLog(Protocol):
    """The methods of `rollout.client.Runs` that are used here."""

    def watch(self, run_id: str, cursor: int = 0, *, payloads: bool = False) -> AsyncGenerator[Page, None]: ...


def published(directory: Path, run_id: str) -> int:
    """Return how many results of the run an earlier command has sent."""
    try:
        saved = unseal((directory / NAME).read_bytes())
    except OSError:
        return 0
    return int(saved["cursor"]) if saved is not None and saved.get("run_id") == run_id else 0


class Publisher(Beside):
    """`job` ends with the run's commit log. `where` is the place of the result files, for messages that are too large
    to send. `tell` is for the user."""

    def __init__(
        self,
        queue: Queue,
        log: CommitLog,
        run_id: str,
        lines: Lines,
        *,
        directory: Path,
        where: str,
        tell: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._log = log
        self._run_id = run_id
        self._lines = lines
        self._path = directory / NAME
        self._where = where
        self._tell = tell
        self._now = now
        self.cursor = published(directory, run_id)
        """Number of results sent."""
        self._saved, self._saved_at = self.cursor, 0.0
        self._saving = threading.Lock()
        self._flushed = 0
        self._moved = asyncio.Event()
        self._away_since: float | None = None
        self._told_at = 0.0
        self._why = ""
        self._sent_at = now()
        self.unsent = 0
        """Number of results left when a queue was given up, once `finish` is over."""

    def flushed(self, count: int) -> None:
        if count > self._flushed:
            self._flushed = count
            self._moved.set()

    async def _run(self) -> None:
        async with aclosing(self._log.watch(self._run_id, self.cursor, payloads=True)) as pages:
            async for page in pages:
                for start in range(0, len(page.entries), AT_ONCE):
                    await self._publish(page.entries[start : start + AT_ONCE])

    async def finish(self, count: int, budget_s: float = FINISH_S) -> None:
        """Send the rest; a queue that takes nothing for `budget_s` is given up."""
        self.flushed(count)
        self._sent_at = self._now()
        while self.cursor < count and self._now() - self._sent_at < budget_s:
            if self.job.done():
                self.job.result()
            self._moved.clear()
            try:
                async with asyncio.timeout(0.5):
                    await self._moved.wait()
            except TimeoutError:
                continue
        self.unsent = max(0, count - self.cursor)

    def check(self) -> None:
        if self.unsent:
            raise UnavailableError(
                f"{self.unsent:,} of the {self._flushed:,} results are in {self._path.parent}, and not in the output "
                f"queue: {self._why or 'it takes them too slowly'}. The same command sends them"
            )

    def save(self) -> None:
        with self._saving:  # at the end it is called while a thread may still be at it
            if (cursor := self.cursor) > self._saved:
                write_atomically(self._path, seal({"run_id": self._run_id, "cursor": cursor}))
                self._saved, self._saved_at = cursor, self._now()

    async def _publish(self, entries: list[CommitEntry]) -> None:
        last = entries[-1].position + 1
        while self._flushed < last:
            self._moved.clear()
            await self._moved.wait()
        pause = PAUSE_S[0]
        messages = [self._message(entry) for entry in entries]
        while True:
            try:
                await self._queue.enqueue(messages)
                break
            except InputError as error:  # too large in a way that could not be told before
                index: object = error.context.get("index")
                if not isinstance(index, int):
                    raise
                pointer = self._pointer(entries[index], *self._line(entries[index]))
                if messages[index] == pointer:
                    raise
                messages[index] = pointer
            except (UnavailableError, ConfigError) as error:
                self._tell_away(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSE_S[1])
        self.cursor, self._sent_at = last, self._now()
        self._moved.set()
        self._tell_back()
        if self._now() - self._saved_at >= SAVE_EVERY_S:
            await asyncio.to_thread(self.save)

    def _message(self, entry: CommitEntry) -> Outgoing:
        name, line = self._line(entry)
        message = self._outgoing(entry, name, line)
        return message if self._queue.fits(message) else self._pointer(entry, name, line)

    def _line(self, entry: CommitEntry) -> tuple[str, bytes]:
        _, [(name, line), *_] = lines_of(self._lines, entry)
        return name, line.rstrip(b"\n")

    def _pointer(self, entry: CommitEntry, name: str, line: bytes) -> Outgoing:
        """Return a message that replaces one that the queue does not take."""
        fields = {
            "run_id": self._run_id,
            "seq": entry.seq,
            "too_large": True,
            "bytes": len(line),
            "file": f"{self._where.rstrip('/')}/{name}",
        }
        return self._outgoing(entry, name, json.dumps(fields).encode())

    def _outgoing(self, entry: CommitEntry, name: str, body: bytes) -> Outgoing:
        attributes = {"run_id": self._run_id, "seq": str(entry.seq), "file": name}
        group = self._run_id if self._queue.facts.ordered else ""  # Pub/Sub: one ordering key is slow (1 MB/s)
        return Outgoing(body, attributes, group=group, deduplication=f"{self._run_id}-{entry.seq}")

    def _tell_away(self, error: RolloutError) -> None:
        """Tell the user at once, and then from time to time."""
        self._why = error.message
        now = self._now()
        if self._away_since is None:
            self._away_since = now
        elif now - self._told_at < TELL_AGAIN_S:
            return
        self._told_at = now
        self._tell(
            f"warning: the output queue takes nothing: {error.message}; results go on into the files, "
            f"{max(0, self._flushed - self.cursor):,} of them wait to be sent"
        )

    def _tell_back(self) -> None:
        self._why = ""
        if self._away_since is not None:
            self._tell(f"the output queue takes results again, after {self._now() - self._away_since:.0f} s")
            self._away_since = None
