"""Owners of sandboxes that are killed: nothing of their sandboxes is left, checked in /proc, the mounts and the groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_worker.sandboxes import cgroups
from rollout_worker.sandboxes.conformance import PROVIDERS

PATIENCE_S = 30.0

OWNER = """
import asyncio, sys
from pathlib import Path
from rollout_worker.sandboxes.conformance import PROVIDERS
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.port import Limits, Network, Spec

BEAT = "while :; do sleep 0.05; echo x >> beats; done"

async def main():
    async with PROVIDERS[sys.argv[1]](Path(sys.argv[2])) as provider:
        try:
            found = await provider.probe()
        except SandboxRefusedError as error:
            print(error, flush=True)
            return
        networks = [Network("allowlist", ("example.org",)), Network("public"), Network("host")]
        networks = [network for network in networks if network.mode in found.networks]
        directories = ("/app", "/tmp") if found.private_directories else ()
        for network in (networks * 2)[:2]:
            spec = Spec(network=network, directories=directories, limits=Limits(cpus=0.2, memory_mb=100))
            sandbox = await provider.create(spec)
            await sandbox.exec(f"(setsid sh -c '{BEAT}' > /dev/null 2>&1 &)")
            asyncio.ensure_future(sandbox.exec(BEAT))
        print("ready", provider.keeper_pid, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


class Owner:
    """A process with two sandboxes, in which something runs that left its session."""

    def __init__(self, provider: str, state: Path) -> None:
        self.state = state
        self.groups = cgroups.find().directories.values()
        command = [sys.executable, "-c", OWNER, provider, str(state)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        word, _, rest = self.process.stdout.readline().strip().partition(" ")
        if word != "ready":
            self.process.communicate()
            pytest.skip(f"{word} {rest}")
        self.zygote = int(rest)
        assert len(self.boxes()) == 2

    def wait_until_it_runs(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while len(found := self.processes()) < 4:
            assert time.monotonic() < until, found
            time.sleep(0.02)

    def processes(self) -> set[int]:
        """Everything with the mark of a sandbox in its environment; the names of sandboxes are like no others."""
        names = {b"ROLLOUT_SANDBOX=" + os.fsencode(name) for name in self.names}
        found: set[int] = set()
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    if names & set((path / "environ").read_bytes().split(b"\0")):
                        found.add(int(path.name))
                except OSError:  # it ended
                    continue
        return found

    def forks(self) -> set[int]:
        """The zygote, sandbox_inits, ways out: their last argument is the owner's id, which is in the sandboxes' names."""
        owner = b"\0" + os.fsencode(next(iter(self.names)).split("-")[-2]) + b"\0"
        found = (path for path in Path("/proc").iterdir() if path.name.isdigit())
        return {int(path.name) for path in found if _command(path).endswith(owner)}

    @property
    def names(self) -> set[str]:
        if not hasattr(self, "_names"):
            self._names = {p.name for p in (self.state / "claims").iterdir()}
        return self._names

    def boxes(self) -> list[str]:
        return sorted(p.name for p in (self.state / "boxes").iterdir())

    def left(self) -> dict[str, object]:
        """What is still there."""
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.state) in line]
        claims = [p.name for p in (self.state / "claims").iterdir()]
        groups = [
            str(d / f"rollout-{name}") for d in self.groups for name in self.names if (d / f"rollout-{name}").exists()
        ]
        found = {
            "processes": sorted(self.processes() | self.forks()),
            "boxes": self.boxes(),
            "claims": claims,
            "groups": groups,
            "mounts": mounts,
        }
        return {what: there for what, there in found.items() if there}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for_nothing_left(self, *parts: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while left := {k: v for k, v in self.left().items() if not parts or k in parts}:
            assert time.monotonic() < until, left
            time.sleep(0.02)


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it ended
        return b""


@pytest.fixture(params=["bubblewrap", "process", "process-without-namespaces"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    with tempfile.TemporaryDirectory(prefix="reaped-") as directory:
        owner = Owner(request.param, Path(directory, "state"))
        try:
            owner.wait_until_it_runs()
            yield owner
        finally:
            owner.kill()
            assert owner.process.stdout is not None
            owner.process.stdout.close()
            owner.wait_for_nothing_left()


def test_a_killed_owner_leaves_nothing(owner: Owner) -> None:
    owner.kill()
    owner.wait_for_nothing_left()


async def test_who_starts_next_reaps_what_an_owner_killed_with_its_keeper_left(
    owner: Owner, request: pytest.FixtureRequest
) -> None:
    os.kill(owner.zygote, signal.SIGKILL)
    owner.kill()
    provider = request.node.callspec.params["owner"]
    if provider != "process-without-namespaces":
        owner.wait_for_nothing_left("processes", "mounts")  # the kernel ends what has a namespace
    assert owner.left()
    async with PROVIDERS[provider](owner.state):
        assert owner.left() == {}


async def test_who_starts_next_leaves_the_living_alone(owner: Owner, request: pytest.FixtureRequest) -> None:
    before = owner.boxes()
    async with PROVIDERS[request.node.callspec.params["owner"]](owner.state):
        pass
    assert owner.boxes() == before
    assert len(owner.processes()) >= 4
