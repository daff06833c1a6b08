"""Sandboxes that are created, reached and removed by shell commands of the user, for any cloud with a command line.

    create_command -> prints the sandbox's id, {sandbox_id} in the others
    exec_command   -> runs {command}, one word: a line for `sh -c` in the sandbox; prints what that prints
    destroy_command

Their isolation is found out by creating two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, field_validator

from rollout_worker.sandboxes.claims import Claim
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.port import (
    Capabilities,
    Host,
    Image,
    Limits,
    Network,
    Price,
    Spec,
)
from rollout_worker.sandboxes.reach import DroppedError, Reach
from rollout_worker.sandboxes.remote_probe import changes_users, limits_of, text_of
from rollout_worker.sandboxes.remote_provider import RemoteProvider
from rollout_worker.sandboxes.remote_sandbox import KillHow, RemoteSandbox, UncontainedSandbox
from rollout_worker.sandboxes.settings import ImageSettings, settings_of
from rollout_worker.sandboxes.templates import check_template, filled, placeholders, words

_OF_SPEC = ("name", "image", "cpus", "memory_mb", "storage_mb", "pids", "network")
_KNOWN = {
    "prepare_command": ("image",),
    "create_command": ("image_id", *_OF_SPEC),
    "exec_command": ("sandbox_id", "name", "command"),
    "download_command": ("sandbox_id", "name", "paths"),
    "destroy_command": ("sandbox_id", "name"),
}
_NEEDED = {"exec_command": ("command",), "download_command": ("paths",)}
_FIRST_NAMESPACE = "pid:[4026531836]"
"""The initial pid namespace of every machine: include/linux/proc_ns.h, PROC_PID_INIT_INO."""
_BYTES_IN_TEXT = 20 << 10  # a word of a command line is at most 128 KiB (execve(2)), and each byte may become four
_END_S = 2.0
_NO_PROGRAM = (126, 127)
"""Exit codes of docker, kubectl and ssh if there is no shell at the other end to run a command."""


class CommandSettings(ImageSettings):
    create_command: str = Field(description="Makes a sandbox; the last line that it prints is the sandbox's id.")
    exec_command: str = Field(description="Runs {command} in the sandbox {sandbox_id}.")
    destroy_command: str = Field(description="Removes the sandbox {sandbox_id}; one that is not there is no fault.")
    prepare_command: str | None = Field(
        default=None, description="Run once for each image; the last line that it prints is the {image_id}."
    )
    download_command: str | None = Field(
        default=None, description="Copies {paths}, words REMOTE:LOCAL; without it files come through exec_command."
    )
    default_image: str | None = Field(default=None, description="The {image} of tasks that name none.")
    env: dict[str, str] = Field(default_factory=dict[str, str], description="For these commands, beside the worker's.")
    working_dir: str | None = Field(default=None, description="Where these commands run; default: the worker's.")
    timeout_secs: float = Field(default=3600, gt=0, description="For one of prepare, create and destroy.")
    exec_patience_secs: float = Field(
        default=10, ge=0, description="How long exec_command is tried again before the sandbox counts as lost."
    )
    max_sandboxes: int = Field(default=64, ge=1, description="At one time, of one worker.")
    usd_per_hour: float = Field(default=0, ge=0, description="What a sandbox costs.")

    @field_validator(*_KNOWN)
    @classmethod
    def _template(cls, value: str | None, info: Any) -> str | None:
        name = str(info.field_name)
        if value is None:
            return None
        check_template(value, _KNOWN[name], _NEEDED.get(name, ()))
        if "sandbox_id" in _KNOWN[name] and not placeholders(value) & {"sandbox_id", "name"}:
            raise ValueError("{sandbox_id} is missing: it must be in there")
        return value


class TemplateReach(Reach):
    wait_s = 10.0

    def __init__(self, settings: CommandSettings, values: Mapping[str, str], *, takes_input: bool) -> None:
        self._settings = settings
        self._values = values
        self.patience_s = settings.exec_patience_secs
        self.allow_input(takes_input)

    def allow_input(self, allowed: bool) -> None:
        self.takes_input = allowed
        self.bytes_in = 1 << 20 if allowed else _BYTES_IN_TEXT

    async def fetch(self, path: str, target: Path) -> bool:
        template = self._settings.download_command
        if template is None:
            return False
        paths = f"{quote(path)}:{quote(str(target))}"
        code, out, said = await run_template(self._settings, filled(template, {**self._values, "paths": paths}))
        if code != 0 or not await asyncio.to_thread(target.is_file):
            raise SandboxError(f"download_command ended with {code} and left no file: {_last(said) or _last(out)}")
        return True

    async def call(self, script: str, data: bytes) -> bytes:
        command = filled(self._settings.exec_command, {**self._values, "command": quote(script)})
        code, out, said = await run_template(self._settings, command, data)
        if code != 0 and not out.strip():
            raise DroppedError(f"exec_command ended with {code}: {_last(said)}", inside=code in _NO_PROGRAM)
        return out


async def run_template(settings: CommandSettings, command: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
    """Run a command and return (exit code, stdout, stderr). If cancelled, kill its process group."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=settings.working_dir,
            env={**os.environ, **settings.env},
            start_new_session=True,
        )
    )
    try:  # cancelled halfway, it would wait for whoever holds the pipes
        process = await asyncio.shield(starting)
        out, said = await process.communicate(data)
        return process.returncode or 0, out, said
    finally:
        if starting.cancelled() or (starting.done() and starting.exception() is not None):
            pass
        elif (process := await starting).returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)


class CommandProvider(RemoteProvider):
    name = "command"

    def __init__(self, state: Path, settings: CommandSettings) -> None:
        super().__init__(state, max_sandboxes=settings.max_sandboxes, price=Price(settings.usd_per_hour))
        self._settings = settings
        used = [t for t in (settings.create_command, settings.prepare_command) if t is not None]
        self._uses = {name for template in used for name in placeholders(template)}
        self._images: dict[str, asyncio.Task[str]] = {}
        self._takes_input = False
        self._kill: KillHow = "marked"

    # Capabilities

    async def _find(self) -> Capabilities:
        network = Network("none" if "network" in self._uses else "public")
        root = Host() if "image" not in self._uses or self._settings.default_image else None
        if root is None:
            why = "create_command has {image}: give `default_image` in provider_config, to try it out with"
            raise SandboxRefusedError(f"command sandboxes cannot be tried out: {why}", reasons=[why])
        spec = Spec(network=network, limits=Limits(1, 512, 1024, 256))
        try:
            async with self._trial(spec, _UNKNOWN) as one, self._trial(spec, _UNKNOWN) as two:
                await self._try_input(one)
                return await self._compare(one, two)
        except SandboxRefusedError:
            raise
        except SandboxError as error:
            why = f"command sandboxes do not work here: {error.message}"
            raise SandboxRefusedError(why, reasons=[error.message]) from error

    async def _try_input(self, sandbox: RemoteSandbox) -> None:
        shell, reach = sandbox.shell, sandbox.shell.reach
        assert isinstance(reach, TemplateReach)
        every = bytes(range(256))
        reach.allow_input(False)
        if (await shell.run("data", every)).out != every:
            why = "exec_command changes what is printed: leave out options such as -t, which make a terminal"
            raise SandboxRefusedError(why, reasons=[why])
        reach.allow_input(True)
        with contextlib.suppress(SandboxError, DroppedError, TimeoutError):
            self._takes_input = (await asyncio.wait_for(shell.once("data", every), 10)).out == every
        reach.allow_input(self._takes_input)

    async def _compare(self, one: RemoteSandbox, two: RemoteSandbox) -> Capabilities:
        notes: list[str] = []
        mine = [await text_of(s, "readlink /proc/self/ns/pid || echo -") for s in (one, two)]
        own = mine[0] != mine[1] and not {"-", _FIRST_NAMESPACE, await asyncio.to_thread(_namespace)} & set(mine)
        self._kill = "new" if own else "marked"
        if not own:
            notes.append(
                "sandboxes have no pid namespace of their own: a deadline ends what a command started, but not what "
                "left its parent and cleared its environment"
            )
        private = await self._is_private(one, two, "/rollout-probe")
        secret = one.out / "secret"
        secret.write_text("of the host")
        hides_host = await text_of(one, f"cat {quote(str(secret))} 2> /dev/null || echo -") == "-"
        await one.write_file(f"{one.home}/rollout-probe", b"x")
        path = quote(f"{one.home}/rollout-probe")
        hides_sandboxes = await text_of(two, f"test -e {path} && echo seen || echo -") == "-"
        only_loopback = await text_of(one, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' \\n'") == "lo"
        networks: set[Literal["none", "public", "allowlist"]] = {"none"} if only_loopback else {"public"}
        if "network" in self._uses:
            networks.add("public")
        notes.append("allowlists of hosts cannot be enforced")
        roots: set[Literal["host", "rootfs", "image"]] = {"image"} if "image" in self._uses else set()
        if "image" not in self._uses or self._settings.default_image:
            roots.add("host")
        return Capabilities(
            private_directories=private,
            own_processes=own,
            hides_sandboxes=hides_sandboxes,
            hides_host=hides_host,
            writable_root=private and await self._is_private(one, two, "/usr/rollout-probe"),
            users=await changes_users(one),
            roots=frozenset(roots),
            networks=frozenset(networks),
            limits=await limits_of(one),
            mounts=False,
            ends_daemons=own,
            notes=tuple(notes),
        )

    async def _is_private(self, one: RemoteSandbox, two: RemoteSandbox, path: str) -> bool:
        """Return whether a directory can be made there that neither this host nor the other sandbox sees."""
        path = f"{path}-{secrets.token_hex(4)}"
        if (await one.shell.run(f"mkdir {path} 2> /dev/null")).code != 0:
            return False
        try:
            here = await asyncio.to_thread(Path(path).exists)
            return not here and (await two.shell.run(f"test -e {path}")).code == 1
        finally:
            await one.shell.run(f"rmdir {path}")

    def _refusals(self, spec: Spec) -> list[str]:
        reasons: list[str] = []
        if isinstance(spec.root, Image):
            if "image" not in self._uses:
                reasons.append(f"create_command has no {{image}}, so that {spec.root.reference} is not what it runs")
        elif not isinstance(spec.root, Host):
            reasons.append("a root file system of this host is not where the commands make sandboxes: name an image")
        elif "image" in self._uses and self._settings.default_image is None:
            reasons.append("there is no image: set docker_image of the task, or `default_image` in provider_config")
        return reasons

    # Making and removing

    async def _start(self, claim: Claim, spec: Spec, found: Capabilities, *, wait: bool) -> RemoteSandbox:
        image = spec.root.reference if isinstance(spec.root, Image) else self._settings.default_image or ""
        limits = spec.limits
        values = words(
            {
                "name": claim.name,
                "image": image,
                "image_id": await self._prepared(image),
                "cpus": f"{limits.cpus:g}",
                "memory_mb": limits.memory_mb,
                "storage_mb": limits.storage_mb,
                "pids": limits.pids,
                "network": spec.network.mode,
            }
        )
        sandbox_id = await self._last_line("create_command", filled(self._settings.create_command, values))
        (Path(claim.box) / "id").write_text(sandbox_id)
        reach = TemplateReach(self._settings, _ids(claim, sandbox_id), takes_input=self._takes_input)
        return await self._enter(
            claim, spec, found, reach, kill=self._kill, home_is_here=True, keep_env=False, kind=UncontainedSandbox
        )

    async def _prepared(self, image: str) -> str:
        if self._settings.prepare_command is None:
            return image
        if image not in self._images or (self._images[image].done() and self._images[image].exception() is not None):
            command = filled(self._settings.prepare_command, words({"image": image}))
            self._images[image] = asyncio.ensure_future(self._last_line("prepare_command", command))
        return await asyncio.shield(self._images[image])

    async def _last_line(self, name: str, command: str) -> str:
        code, out, said = await self._run(command)
        lines = out.decode(errors="replace").strip().splitlines()
        if code != 0:
            raise SandboxCreateError(f"{name} ended with {code}: {_last(said) or _last(out)}")
        if not lines:
            raise SandboxCreateError(f"{name} printed nothing, where an id was to be")
        return lines[-1].strip()

    async def _run(self, command: str) -> tuple[int, bytes, bytes]:
        try:
            return await asyncio.wait_for(run_template(self._settings, command), self._settings.timeout_secs)
        except TimeoutError:
            return 124, b"", f"it took more than {self._settings.timeout_secs:g} s".encode()

    async def _remove(self, claim: Claim) -> None:
        try:
            sandbox_id = (Path(claim.box) / "id").read_text()
        except FileNotFoundError:  # it was not made, or its id was never printed
            if "sandbox_id" in placeholders(self._settings.destroy_command):
                return
            sandbox_id = ""
        code, out, said = await self._run(filled(self._settings.destroy_command, _ids(claim, sandbox_id)))
        if code != 0:
            why = _last(said) or _last(out)
            raise SandboxTeardownError(f"{claim.name} is not removed: destroy_command ended with {code}: {why}")


_UNKNOWN = Capabilities(mounts=False, ends_daemons=False)
"""Capabilities assumed while sandboxes are tried out."""


def _namespace() -> str:
    """Return this process's pid namespace, or "-" if the kernel has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "-"


def _ids(claim: Claim, sandbox_id: str) -> dict[str, str]:
    return words({"sandbox_id": sandbox_id, "name": claim.name})


def _last(said: bytes) -> str:
    return said[-1000:].decode(errors="replace").strip()


def open_command(state: Path, config: Mapping[str, Any] = MappingProxyType({})) -> CommandProvider:
    """Return the provider `command`; use it with `async with`. Raises ConfigError if a template is wrong."""
    return CommandProvider(state, settings_of(CommandSettings, config, CommandProvider.name))
