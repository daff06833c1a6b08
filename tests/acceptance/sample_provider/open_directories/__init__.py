"""Sandboxes that are directories of this machine. They isolate nothing, and say so: the spec that asks is refused."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.claims import Claim
from rollout_worker.sandboxes.errors import SandboxGoneError
from rollout_worker.sandboxes.port import Capabilities, Host, Spec
from rollout_worker.sandboxes.reach import Reach
from rollout_worker.sandboxes.remote_provider import RemoteProvider
from rollout_worker.sandboxes.remote_sandbox import RemoteSandbox, UncontainedSandbox
from rollout_worker.sandboxes.settings import Settings, settings_of


class DirectorySettings(Settings):
    max_sandboxes: int = 8


class DirectoryReach(Reach):
    """The one way into a sandbox: run a shell there. Commands, files and deadlines are built upon it."""

    def __init__(self, box: Path) -> None:
        self._box = box

    async def call(self, script: str, data: bytes) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", script),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=self._box / "home",
                env={"PATH": os.environ["PATH"], "TMPDIR": str(self._box / "tmp")},
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise SandboxGoneError(f"{self._box.name} is gone: somebody removed its directory") from error
        try:
            return (await process.communicate(data))[0]
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


class DirectoryProvider(RemoteProvider):
    name = "directories"

    async def _find(self) -> Capabilities:
        return Capabilities(
            roots=frozenset({"host"}),
            networks=frozenset({"host"}),
            mounts=False,
            ends_daemons=False,
            notes=("nothing is isolated",),
        )

    def _refusals(self, spec: Spec) -> list[str]:
        reasons = [] if isinstance(spec.root, Host) else ["directories hold no images"]
        return reasons + (["commands run as the worker's user"] if spec.user is not None else [])

    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> RemoteSandbox:
        for name in ("home", "tmp"):
            (Path(claim.box) / name).mkdir()
        reach, kind = DirectoryReach(Path(claim.box)), UncontainedSandbox
        return await self._enter(claim, spec, found, reach, kind=kind, kill="marked", home_is_here=True, keep_env=False)


def open_directories(state: Path, config: Mapping[str, Any]) -> DirectoryProvider:
    settings = settings_of(DirectorySettings, config, DirectoryProvider.name)
    return DirectoryProvider(state, max_sandboxes=settings.max_sandboxes)
