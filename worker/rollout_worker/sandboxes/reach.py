"""Calls into a sandbox that offers only "run this there": complete answers, and retries."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from rollout_worker.sandboxes import scripts
from rollout_worker.sandboxes.errors import SandboxEndedError, SandboxError, SandboxFileError, SandboxGoneError

_FIRST_S, _LONGEST_S = 0.1, 2.0


class DroppedError(Exception):
    """The answer was incomplete: the request may or may not have been carried out.

    `inside` says that the connection works but the sandbox does not answer.
    """

    def __init__(self, message: str, *, inside: bool = False) -> None:
        super().__init__(message)
        self.inside = inside


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: bytes


class Reach(ABC):
    """A way to reach one sandbox. `bytes_in` and `bytes_out` are about what one call may carry.

    `takes_input` says whether standard input arrives; else input is part of the script. `patience_s` is for how long a
    dropped call is retried before the sandbox counts as gone.
    """

    takes_input: bool = True
    bytes_in: int = 1 << 20
    bytes_out: int = 4 << 20
    wait_s: float = 10.0  # for waiting inside one call, because idle connections are dropped
    patience_s: float = 60.0

    async def fetch(self, path: str, target: Path) -> bool:
        """Copy a file of the sandbox to this host by a better way than calls. Returns False if there is none."""
        return False

    @abstractmethod
    async def call(self, script: str, data: bytes) -> bytes:
        """Return what `sh -c SCRIPT` printed, with `data` as its standard input. Raises DroppedError,
        SandboxGoneError."""


class Shell:
    """Runs scripts in one sandbox. Each must be safe to run twice."""

    def __init__(self, name: str, reach: Reach) -> None:
        self.name = name
        self.reach = reach
        self._gone: asyncio.Future[None] | None = None
        self._why: SandboxGoneError | None = None

    def close(self, why: SandboxGoneError) -> None:
        """Mark the sandbox as gone, for later calls and for those that wait for an answer."""
        self._why = self._why or why
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _gone_error(self) -> SandboxGoneError:
        assert self._why is not None
        return type(self._why)(self._why.message)

    async def run(self, script: str, data: bytes = b"", *, patience_s: float | None = None) -> Answer:
        """Run a script, with retries. Raises SandboxFileError if it reports a file error, SandboxGoneError if all
        retries fail."""
        until = time.monotonic() + (self.reach.patience_s if patience_s is None else patience_s)
        wait = _FIRST_S
        while True:
            try:
                answer = await self._once(script, data)
            except DroppedError as error:
                if time.monotonic() + wait > until:
                    kind = SandboxEndedError if error.inside else SandboxGoneError
                    self.close(kind(f"{self.name} does not answer any more: {error}"))
                    raise self._gone_error() from error
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_S)
                continue
            if answer.code == scripts.FAULT:
                reason = answer.out.decode(errors="replace")
                raise SandboxFileError(f"a file in {self.name}: {reason}", reason=reason)
            return answer

    async def check(self, script: str, data: bytes = b"") -> bytes:
        """Run a script and return what it printed. Raises SandboxError if its exit code is not 0."""
        answer = await self.run(script, data)
        if answer.code != 0:
            raise SandboxError(
                f"{self.name}: a script ended with {answer.code}: {answer.out[-500:].decode('utf-8', 'replace')}"
            )
        return answer.out

    async def once(self, script: str, data: bytes = b"") -> Answer:
        """Run a script without retries. Raises also DroppedError."""
        return await self._once(script, data)

    async def _once(self, script: str, data: bytes) -> Answer:
        if self._why is not None:
            raise self._gone_error()
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
        mark = secrets.token_hex(8)
        text = scripts.framed(script, mark, data, by_input=self.reach.takes_input)
        calling = asyncio.ensure_future(self.reach.call(text, data if self.reach.takes_input else b""))
        try:
            await asyncio.wait([calling, self._gone], return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise self._gone_error()
            return _within(await calling, mark)
        except SandboxGoneError as error:
            self.close(error)
            raise
        finally:
            calling.cancel()
            await asyncio.wait([calling])


def _within(said: bytes, mark: str) -> Answer:
    begin, end = f"\n{mark}<\n".encode(), re.compile(rb"\n" + mark.encode() + rb">(\d+)\n")
    if begin.replace(b"\n", b"\r\n") in said:
        raise DroppedError("its lines came with carriage returns: exec must not give commands a terminal")
    start = said.find(begin)
    found = None if start < 0 else end.search(said, start)
    if found is None:
        raise DroppedError(f"it printed {_shown(said)}")
    return Answer(int(found[1]), said[start + len(begin) : found.start()])


def _shown(said: bytes) -> str:
    text = said[-300:].decode(errors="replace").strip()
    return f"no whole answer, but: {text}" if text else "nothing"
