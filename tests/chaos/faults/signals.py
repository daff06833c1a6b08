"""SIGKILL and SIGSTOP of a daemon, whichever it is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence

import psutil

from chaos.faults.fault import Fault
from chaos.world import TTL_S, Daemon

RESTART_S = (0.0, 1.0)


class Kill(Fault):
    """SIGKILL of a daemon, or of it with its children, as a lost machine would be; started again within a second."""

    daemon: Daemon
    victims: Sequence[psutil.Process] = ()
    code: int | None = None

    def choose_victims(self) -> None:
        """Before work in flight is looked for: finding children takes longer than a row."""
        self.tree = self.dice.random() < 0.5
        self.victims = self.daemon.tree() if self.tree else [psutil.Process(self.daemon.pid)]

    async def strike(self) -> None:
        self.daemon.down = True
        for process in self.victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert self.daemon.node.process is not None
        self.code = await asyncio.to_thread(self.daemon.node.process.wait)

    async def hold(self) -> None:
        await asyncio.sleep(self.dice.uniform(*RESTART_S))

    async def heal(self) -> None:
        self.world.restart(self.daemon)

    def effect(self) -> str:
        return f"SIGKILL{' with children' if self.tree else ''}" if self.code == -signal.SIGKILL else ""


class Stop(Fault):
    """SIGSTOP of a daemon and its children beyond the TTL, then SIGCONT."""

    daemon: Daemon
    longer_s = (0.5, 2.0)
    was_stopped = False

    def victims(self) -> list[psutil.Process]:
        return self.daemon.tree()

    async def strike(self) -> None:
        self.daemon.stopped = True
        self.processes = self.victims()
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    async def hold(self) -> None:
        await asyncio.sleep(TTL_S + self.dice.uniform(*self.longer_s))

    async def heal(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.was_stopped = self.processes[0].status() == psutil.STATUS_STOPPED
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self.daemon.stopped = False

    def effect(self) -> str:
        return "stopped" if self.was_stopped else ""
