"""The common part of remote providers: a maximum number of sandboxes, and registry images.

A provider says how a sandbox is made and reached (`_start`), and how it is removed (`_remove`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

from rollout_worker.sandboxes.claims import Capacity, Claim
from rollout_worker.sandboxes.errors import SandboxCreateError, SandboxError, SandboxGoneError
from rollout_worker.sandboxes.owning import OwningProvider, identity
from rollout_worker.sandboxes.port import (
    CONTAINER,
    Capabilities,
    Host,
    Image,
    Limits,
    Network,
    NetworkMode,
    Price,
    Spec,
)
from rollout_worker.sandboxes.reach import Reach, Shell
from rollout_worker.sandboxes.remote_probe import changes_users, limits_of
from rollout_worker.sandboxes.remote_sandbox import KillHow, RemoteSandbox, enter
from rollout_worker.sandboxes.threads import in_thread

UNKNOWN = replace(CONTAINER, mounts=False)
"""Capabilities of a sandbox used for probing."""
_PROBE_IMAGE = "debian:12-slim"
_TRIED = 60.0


class RemoteProvider(OwningProvider[RemoteSandbox]):
    shares_room = False

    def __init__(self, state: Path, *, max_sandboxes: int, price: Price | None = None) -> None:
        super().__init__(state.absolute() / self.name, Capacity(cpus=1024, memory_mb=16 << 20), price)
        self._max_sandboxes = max_sandboxes
        self._in_room: set[str] = set()

    async def _try_to_reserve(self, claim: Claim) -> bool:
        if len(self._in_room) >= self._max_sandboxes:
            return False
        self._in_room.add(claim.name)
        await in_thread(self._journal.write, claim)
        return True

    def _free(self, claim: Claim) -> None:
        self._in_room.discard(claim.name)
        super()._free(claim)

    async def _enter(
        self,
        claim: Claim,
        spec: Spec,
        found: Capabilities,
        reach: Reach,
        *,
        kill: KillHow = "all",
        home_is_here: bool = False,
        keep_env: bool = True,
        kind: type[RemoteSandbox] = RemoteSandbox,
    ) -> RemoteSandbox:
        """Prepare a new sandbox. `home_is_here` is as in `enter`, `keep_env` as in the sandbox."""
        shell = Shell(claim.name, reach)
        try:
            entered = await enter(shell, spec, home_is_here=home_is_here)
        except SandboxGoneError as error:
            raise SandboxCreateError(f"{claim.name} was made, but cannot be reached: {error.message}") from error
        known = self._known(claim, spec, found, entered.home)
        return kind(known, shell, entered, kill=kill, keep_env=keep_env)


class ServiceProvider(RemoteProvider):
    """A service that runs registry images, each in a sandbox of its own."""

    allowlists: str
    """A note on what an allowlist may contain or lets through."""
    closing_faults: tuple[type[SandboxError], ...] = ()
    """Errors that `_start` raises if it finds open a network that should be closed."""

    def __init__(
        self, state: Path, *, max_sandboxes: int, price: Price, default_image: str | None, probed: Limits, opens: str
    ) -> None:
        """`probed` limits sandboxes used for probing. `opens` is a script that exits with 0 only in an open network,
        with 77 if there is no program to try it."""
        super().__init__(state, max_sandboxes=max_sandboxes, price=price)
        self._default_image = default_image
        self._probed = probed
        self._opens = opens
        self._state_id = ""

    async def _connect(self) -> None:
        self._state_id = await in_thread(identity, self.state)

    def _image(self, spec: Spec) -> str:
        return spec.root.reference if isinstance(spec.root, Image) else self._default_image or ""

    def _refusals(self, spec: Spec) -> list[str]:
        if isinstance(spec.root, Image) or (isinstance(spec.root, Host) and self._default_image):
            return []
        return [
            f"{self.name} runs images of a registry: set docker_image of the task (a Dockerfile must be built and "
            "pushed first), or `default_image` in provider_config"
        ]

    async def _find(self) -> Capabilities:
        notes = self._remarks()
        root = Image(self._default_image or _PROBE_IMAGE)
        open_one, closed_one = (Spec(root, self._probed, Network(mode)) for mode in ("public", "none"))
        async with self._trial(open_one, UNKNOWN) as sandbox:
            users = await changes_users(sandbox)
            kept = await limits_of(sandbox)
            code = (await sandbox.exec(self._opens, timeout_s=_TRIED)).exit_code
        networks: set[NetworkMode] = {"public"}
        if code == 77:
            why = "the image has no bash, nc or python3 to find out whether they are"
        elif code != 0:
            why = "an open one reaches nothing by which it could be found out"
        elif why := await self._why_open(closed_one):
            pass
        else:
            networks |= {"none", "allowlist"}
        notes.append(f"networks cannot be closed: {why}" if why else self.allowlists)
        return replace(
            UNKNOWN,
            users=users,
            roots=frozenset({"image", "host"} if self._default_image else {"image"}),
            networks=frozenset(networks),
            limits=kept,
            notes=tuple(notes),
        )

    async def _why_open(self, spec: Spec) -> str:
        try:
            async with self._trial(spec, UNKNOWN) as sandbox:
                code = (await sandbox.exec(self._opens, timeout_s=_TRIED)).exit_code
        except self.closing_faults as error:
            return error.message
        return "one that was to be closed is open" if code in (0, 77) else ""

    @abstractmethod
    def _remarks(self) -> list[str]:
        """Return sentences for `Capabilities.notes`."""
