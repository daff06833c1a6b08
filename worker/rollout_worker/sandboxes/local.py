"""What the providers of this host share: claims, limits, the keeper, commands and files. Linux."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tarfile
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, ParamSpec, TypeVar

import psutil
import structlog
from rollout.compute import cgroup as own_cgroup

from rollout_worker.sandboxes import cgroups, pipes, trees
from rollout_worker.sandboxes.allowlist import Allowlist
from rollout_worker.sandboxes.claims import MARK, Capacity, Claim, Journal
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.keeping import Keeper, Warden, body_of
from rollout_worker.sandboxes.output import Capture
from rollout_worker.sandboxes.port import (
    MIB,
    Capabilities,
    Enforcement,
    Finished,
    LimitName,
    Limits,
    Network,
    OnOutput,
    Provider,
    Sandbox,
    Spec,
    Stream,
    Transfer,
)
from rollout_worker.sandboxes.proxy import Proxy

log = structlog.get_logger()

PROXY_PORT = 3128
_END_S = 10.0
_DRAIN_S = 5.0
_ROOM_S = 0.1  # until claims are counted again: owners in other processes do not tell when they free something
_REAP_EVERY_S = 5.0
_LOOK_S = 1.0  # at the storage of a sandbox, at most so often, and at most a twentieth of the time

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars."""

    cpu_hour: float = 0.0
    gib_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Features:
    """What was found to work here, and why the rest does not."""

    namespaces: bool
    network: bool
    overlay: bool
    notes: tuple[str, ...] = ()


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like asyncio.to_thread, but cancelled only once the work has ended: what it does is not left half done."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def host_capacity() -> Capacity:
    """This host's processors, and nine tenths of its memory, within the limits of this process's own control group."""
    quota = own_cgroup.cpu_limit()
    limit = own_cgroup.memory_limit()
    memory = int(psutil.virtual_memory().total)
    count = float(os.cpu_count() or 1)
    return Capacity(
        count if quota is None else min(quota, count), int((memory if limit is None else min(limit, memory)) * 0.9) >> 20
    )


class LocalProvider(Provider):
    """Providers say what a sandbox's warden is to make; the rest is here."""

    def __init__(self, state: Path, *, capacity: Capacity | None = None, price: Price | None = None) -> None:
        """`state`: a directory of this host for claims and sandboxes; providers and processes may share one.

        `capacity`: what sandboxes with claims there may declare together; others wait. Default: this host's.
        """
        self._journal = Journal(state.absolute())
        self._capacity = capacity or host_capacity()
        self._price = price or Price()
        self._owner = secrets.token_hex(8)
        self._keeper = Keeper(self._journal.state, self._owner)
        self._groups = cgroups.Place({}, False)
        self._probing = asyncio.Lock()
        self._found: tuple[Features, Capabilities] | None = None
        self._turn = asyncio.Lock()  # in order: a sandbox that needs much is not overtaken for ever by small ones
        self._freed = asyncio.Event()
        self._sandboxes: set[LocalSandbox] = set()

    @property
    def state(self) -> Path:
        return self._journal.state

    @property
    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    async def open(self) -> None:
        """Reap what dead owners left. SandboxRefusedError, SandboxCreateError."""
        if sys.platform != "linux":
            why = f"{self.name} sandboxes need Linux; this is {sys.platform}"
            raise SandboxRefusedError(why, reasons=[why])
        await in_thread(self._journal.prepare)
        await self.reap()
        self._groups = await in_thread(cgroups.find)
        await self._keeper.start()

    async def close(self) -> None:
        results = await asyncio.gather(*(s.destroy() for s in list(self._sandboxes)), return_exceptions=True)
        await self._keeper.stop()
        for fault in results:
            if isinstance(fault, BaseException):
                raise fault

    async def reap(self) -> None:
        """Clear what owners that are dead have left, on this state directory."""
        for claim, why in await in_thread(self._journal.reap):
            log.warning("sandbox_not_reaped", sandbox=claim.name, error=why)

    # What there is

    async def probe(self) -> Capabilities:
        return (await self._probe())[1]

    async def _probe(self) -> tuple[Features, Capabilities]:
        async with self._probing:
            if self._found is None:
                features = await self._find_features()
                self._found = features, self._describe(features)
            return self._found

    async def _find_features(self) -> Features:
        """The first of the provider's ways that makes a sandbox in which a command runs."""
        notes: list[str] = []
        for features in self._ways():
            spec = Spec(network=Network("none" if features.network else "public"), limits=Limits(0.1, 256, 256, 64))
            claim = self._claim(spec, features)
            try:
                sandbox = await self._make(claim, spec, features, None)
                try:
                    finished = await sandbox.exec(["/bin/sh", "-c", "exit 7"], timeout_s=10)
                finally:
                    await sandbox.destroy()
            except SandboxError as error:
                notes.append(error.message)
                continue
            if finished.exit_code == 7:
                return replace(features, notes=(*features.notes, *notes))
            notes.append(f"a command that was to end with 7 {finished.how}: {finished.stderr.text().strip()}")
        raise SandboxRefusedError(f"{self.name} sandboxes do not work here: {'; '.join(notes)}", reasons=notes)

    @abstractmethod
    def _ways(self) -> Sequence[Features]:
        """Best first."""

    @abstractmethod
    def _describe(self, features: Features) -> Capabilities: ...

    @abstractmethod
    def _refusals(self, spec: Spec, features: Features) -> list[str]:
        """What this provider cannot keep, beyond its capabilities; a sentence each."""

    @abstractmethod
    def _prepare(self, box: Path, spec: Spec, features: Features) -> dict[str, Any]:
        """Make the files of a sandbox below `box`; what its warden needs to know. Blocks. OSError."""

    @abstractmethod
    def _home(self, box: Path, features: Features) -> str: ...

    @abstractmethod
    def _path(self) -> str:
        """PATH of commands."""

    def enforcement(self, features: Features) -> dict[LimitName, Enforcement]:
        by_group = self._groups.directories
        # RLIMIT_NPROC counts a user's processes in its user namespace, and does not hold root (getrlimit(2)).
        nproc = features.namespaces and os.geteuid() != 0
        return {
            "cpus": "kernel" if "cpu" in by_group else "no",
            "memory": "kernel" if "memory" in by_group else "process",
            "pids": "kernel" if "pids" in by_group or nproc else "no",
            "storage": "watched",
        }

    def _check(self, spec: Spec, features: Features, capabilities: Capabilities) -> None:
        reasons: list[str] = []
        if spec.network.mode not in capabilities.networks:
            reasons.append(f"network `{spec.network.mode}` cannot be enforced here")
        elif spec.network.mode == "allowlist":
            reasons += Allowlist.faults(spec.network.hosts)
        if spec.directories and not capabilities.private_directories:
            reasons.append(f"{', '.join(spec.directories)} cannot be private here: there is no mount namespace")
        if spec.mounts and not features.namespaces:
            reasons.append("mounts cannot be made here: there is no mount namespace")
        if spec.user is not None and not self.may_be(spec.user):
            reasons.append(f"commands cannot run as user {spec.user}: the worker is not root")
        for path in (*spec.directories, *(m.target for m in spec.mounts), *([spec.workdir] if spec.workdir else [])):
            if not path.startswith("/") or path != os.path.normpath(path) or path == "/" or "\0" in path:
                reasons.append(f"{path!r} is not an absolute path below / without . and ..")
        reasons += [f"there is no {m.source} to mount" for m in spec.mounts if not m.source.exists()]
        for name in sorted(spec.require):
            if capabilities.limits[name] != "kernel":
                how = {"process": "for each process only", "watched": "by looking now and then", "no": "not at all"}
                reasons.append(f"the limit on {name} is kept {how[capabilities.limits[name]]} here")
        if spec.limits.cpus > self._capacity.cpus:
            reasons.append(f"{spec.limits.cpus:g} cpus are more than the {self._capacity.cpus:g} of this host")
        if spec.limits.memory_mb > self._capacity.memory_mb:
            reasons.append(f"{spec.limits.memory_mb} MB are more than this host's {self._capacity.memory_mb} MB")
        if min(spec.limits.cpus, spec.limits.memory_mb, spec.limits.storage_mb, spec.limits.pids) <= 0:
            reasons.append("limits must be above 0")
        reasons += self._refusals(spec, features)
        if features.notes and reasons:
            reasons += features.notes
        if reasons:
            raise SandboxRefusedError(f"{self.name} cannot keep what was asked for: {'; '.join(reasons)}", reasons=reasons)

    # Making and removing

    async def create(self, spec: Spec) -> LocalSandbox:
        features, capabilities = await self._probe()
        self._check(spec, features, capabilities)
        return await self._make(self._claim(spec, features), spec, features, capabilities)

    def _claim(self, spec: Spec, features: Features) -> Claim:
        name = f"{self.name}-{secrets.token_hex(6)}"
        groups = tuple(str(path) for path in self._groups.paths(f"rollout-{name}"))
        box = self._journal.boxes / name
        limits = spec.limits
        marked = not features.namespaces
        return Claim(name, self.name, self._owner, str(box), limits.cpus, limits.memory_mb, groups, marked)

    async def _make(
        self, claim: Claim, spec: Spec, features: Features, capabilities: Capabilities | None
    ) -> LocalSandbox:
        proxy = None
        warden = None
        try:
            if capabilities is not None:  # probes are small, and must not wait for room
                await self._reserve(claim)
            else:
                await in_thread(self._journal.write, claim)
            config = await in_thread(self._lay_out, claim, spec, features)
            if not self._keeper.alive:
                self._keeper = Keeper(self._journal.state, self._owner)
                await self._keeper.start()
            warden = self._keeper.make(config)
            listener = await warden.made
            if listener is not None:
                proxy = Proxy(Allowlist(spec.network.hosts))
                await proxy.start(listener)
        except BaseException as error:
            if warden is not None:
                await asyncio.shield(warden.end(_END_S))
            await asyncio.shield(self._clear(claim))
            if isinstance(error, OSError):
                raise SandboxCreateError(f"the sandbox could not be made: {error}") from error
            raise
        sandbox = LocalSandbox(self, claim, spec, features, capabilities, warden, proxy, self._price)
        self._sandboxes.add(sandbox)
        sandbox.watch()
        return sandbox

    async def _reserve(self, claim: Claim) -> None:
        looked = time.monotonic()
        async with self._turn:
            while True:
                self._freed.clear()
                if await in_thread(self._journal.reserve, claim, self._capacity):
                    return
                if time.monotonic() - looked > _REAP_EVERY_S:
                    await self.reap()
                    looked = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _ROOM_S)

    def _lay_out(self, claim: Claim, spec: Spec, features: Features) -> dict[str, Any]:
        limits = spec.limits
        box = Path(claim.box)
        for directory in (box, box / "in", box / "out"):
            directory.mkdir(mode=0o700)
        groups: list[Path] = []
        if claim.cgroups:
            name = f"rollout-{claim.name}"
            memory = limits.memory_mb * MIB
            groups = cgroups.make(self._groups, name, cpus=limits.cpus, memory=memory, pids=limits.pids)
        root = os.geteuid() == 0
        return {
            "name": claim.name,
            "hostname": claim.name,
            "box": str(box / "in"),
            "namespaces": features.namespaces,
            "network": spec.network.mode,
            "proxy_port": PROXY_PORT,
            "cgroups": [str(group) for group in groups],
            "map": None if root else self._map(),
            "drop": False,
            "bubblewrap": None,
            "host": None,
            **self._prepare(box, spec, features),
        }

    def _map(self) -> tuple[int, int]:
        """Who a worker that is not root is in its sandboxes: (user, group)."""
        return os.geteuid(), os.getegid()

    def may_be(self, user: str | int) -> bool:
        """Whether commands can run as this user."""
        if os.geteuid() == 0:
            return True
        number = self._map()[0]
        return str(user) == str(number) or (number == 0 and user == "root")

    def rlimits(self, spec: Spec, features: Features) -> dict[str, int]:
        how = self.enforcement(features)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": spec.limits.storage_mb * MIB}
        if how["memory"] == "process":
            limits["RLIMIT_DATA"] = spec.limits.memory_mb * MIB
        if "pids" not in self._groups.directories and how["pids"] == "kernel":
            limits["RLIMIT_NPROC"] = spec.limits.pids + 2  # its pid 1 and the warden are of this user too
        return limits

    def environment(self, spec: Spec, sandbox: LocalSandbox) -> dict[str, str]:
        found = {"PATH": self._path(), "HOME": sandbox.home, "LANG": "C.UTF-8", MARK: sandbox.name}
        if spec.network.mode == "allowlist":
            url = f"http://127.0.0.1:{PROXY_PORT}"
            for name in ("http_proxy", "https_proxy"):  # a convenience: without it there is only no network at all
                found[name] = found[name.upper()] = url
        return {**found, **spec.env}

    async def _clear(self, claim: Claim) -> None:
        """SandboxTeardownError: something is left, and the claim stays."""
        try:
            await in_thread(self._journal.clear, claim)
        except OSError as error:
            raise SandboxTeardownError(f"{claim.name} is not removed: {error}") from error
        finally:
            self._freed.set()

    async def remove(self, sandbox: LocalSandbox, claim: Claim) -> None:
        self._sandboxes.discard(sandbox)
        await self._clear(claim)

    def home(self, box: Path, features: Features) -> str:
        return self._home(box, features)


class LocalSandbox(Sandbox):
    """A sandbox of this host."""

    def __init__(
        self,
        provider: LocalProvider,
        claim: Claim,
        spec: Spec,
        features: Features,
        capabilities: Capabilities | None,
        warden: Warden,
        proxy: Proxy | None,
        price: Price,
    ) -> None:
        self.name = claim.name
        self.spec = spec
        if capabilities is not None:
            self.capabilities = capabilities
        self._provider = provider
        self._claim = claim
        self._features = features
        self._warden = warden
        self._proxy = proxy
        self._price = price
        self._box = Path(claim.box)
        self.home = provider.home(self._box, features)
        self._started = time.monotonic()
        self._ended: float | None = None
        self._stopped = False
        self._destroyed: asyncio.Task[None] | None = None
        self._outputs = 0
        self._storage_hit = 0
        self._watcher: asyncio.Task[None] | None = None
        self._strays: set[asyncio.Task[None]] = set()

    def __hash__(self) -> int:
        return id(self)

    # Commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | AsyncIterator[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        keep_bytes: int = MIB,
        output_dir: Path | None = None,
    ) -> Finished:
        if self._stopped:
            raise SandboxGoneError(f"{self.name} was stopped")
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        user = self.spec.user if user is None else user
        if user is not None and not self._provider.may_be(user):
            why = f"commands cannot run as user {user}: the worker is not root"
            raise SandboxRefusedError(why, reasons=[why])
        body = {
            "argv": argv,
            "env": {**self._provider.environment(self.spec, self), **(env or {})},
            "cwd": self._absolute(cwd) if cwd else self.workdir,
            "user": user,
            "rlimits": self._provider.rlimits(self.spec, self._features),
        }
        self._outputs += 1
        captures: dict[Stream, Capture] = {
            "stdout": Capture(keep_bytes, self._output_path(output_dir, self._outputs, "stdout")),
            "stderr": Capture(keep_bytes, self._output_path(output_dir, self._outputs, "stderr")),
        }
        memory_kills = cgroups.memory_kills(self._claim.groups)
        storage_hit = self._storage_hit
        begun = time.monotonic()
        timed_out = False
        try:
            running = _Running(self._warden, body, stdin, captures, on_output)
            try:
                await asyncio.wait_for(running.finish(), timeout_s)
            except TimeoutError:
                timed_out = True
                await self.kill()
                await running.drain()
            except BaseException:  # cancelled, or a fault of `on_output`: nobody waits for the command any more
                with contextlib.suppress(SandboxGoneError):
                    await asyncio.shield(self.kill())
                raise
            finally:
                self._keep_draining(running)
        finally:
            outputs = {name: capture.close() for name, capture in captures.items()}
        answer = running.answer
        limit: Literal["memory", "storage"] | None = None
        if self._storage_hit > storage_hit:
            limit = "storage"
        elif cgroups.memory_kills(self._claim.groups) > memory_kills:
            limit = "memory"
        return Finished(
            how="timed_out" if timed_out else "signalled" if "signal" in answer else "exited",
            exit_code=None if timed_out else answer.get("exit"),
            signal=None if timed_out else answer.get("signal"),
            stdout=outputs["stdout"],
            stderr=outputs["stderr"],
            duration_s=time.monotonic() - begun,
            limit=limit,
        )

    def _output_path(self, directory: Path | None, number: int, stream: str) -> Callable[[], Path]:
        return lambda: (directory or self._box / "out") / f"{number}-{stream}"

    def _keep_draining(self, running: _Running) -> None:
        """A process that a command left behind goes on printing: it must not be stopped by a full or a closed pipe."""
        stray = asyncio.ensure_future(running.discard())
        self._strays.add(stray)
        stray.add_done_callback(self._strays.discard)

    async def kill(self) -> None:
        for _ in range(3):  # the process that kills is in the sandbox, where others may kill it before it does
            answer = await self._warden.ask("kill")
            if answer.get("exit") == 0:
                return
            if "exit" in answer:
                break
        raise SandboxError(f"processes in {self.name} do not end")

    async def stop(self) -> None:
        self._stopped = True
        await self.kill()

    # Files

    def _absolute(self, path: str) -> str:
        if "\0" in path:
            raise SandboxFileError(f"{path!r} is no path", reason="EINVAL")
        return os.path.normpath(os.path.join(self.workdir, path)) if not path.startswith("/") else path  # noqa: PTH118

    async def read_file(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        reader, writer = pipes.pipe()
        try:
            reading = asyncio.ensure_future(pipes.read_all(reader, max_bytes))
            try:
                await self._files({"what": "read", "path": path, "max_bytes": max_bytes}, writer)
                return await reading
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        finally:
            os.close(reader)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        reader, writer = pipes.pipe()

        with os.fdopen(writer, "wb", buffering=0) as file:

            async def send() -> None:
                await pipes.write_all(file.fileno(), data)
                file.close()

            sending = asyncio.ensure_future(send())
            try:
                await self._files({"what": "write", "path": path, "mode": mode}, reader)
            finally:
                sending.cancel()
                await asyncio.wait([sending])

    async def upload(self, source: Path, target: str) -> Transfer:
        reader, writer = pipes.pipe()

        def send() -> trees.Moved | None:
            try:
                with os.fdopen(writer, "wb") as stream:
                    return trees.pack(str(source), stream)
            except BrokenPipeError:  # the other side has given up, and says why
                return None

        (sent, _), fault = await self._both(send, {"what": "unpack", "path": target}, reader)
        if fault is not None:
            raise fault
        return Transfer(sent.files, sent.size, tuple(sent.skipped)) if sent else Transfer(0, 0)

    async def download(self, source: str, target: Path, *, max_bytes: int = 4096 * MIB) -> Transfer:
        reader, writer = pipes.pipe()

        def receive() -> trees.Moved | None:
            with os.fdopen(reader, "rb") as stream:
                moved = _unpack(stream, target, max_bytes)
                while stream.read(1 << 16):  # what follows the archive's end
                    pass
                return moved

        request = {"what": "pack", "path": source, "max_bytes": max_bytes}
        (got, result), fault = await self._both(receive, request, writer)
        if fault is not None:
            raise fault
        if got is None:
            raise SandboxFileError(f"{source} did not arrive whole", reason="EIO")
        skipped = [(name, why) for name, why in (result or {}).get("skipped", [])]
        return Transfer(got.files, got.size, (*skipped, *got.skipped))

    async def _both(
        self, work: Callable[[], T], request: dict[str, Any], fd: int
    ) -> tuple[tuple[T | None, dict[str, Any] | None], SandboxError | None]:
        """Our half of a transfer in a thread, the sandbox's beside it. A fault of ours is raised first."""
        ours = asyncio.ensure_future(in_thread(work))
        fault: SandboxError | None = None
        result: dict[str, Any] | None = None
        try:
            result = await self._files(request, fd)
        except (SandboxFileError, SandboxGoneError) as error:
            fault = error
        finally:
            await asyncio.wait([ours])
        done = None
        try:
            done = ours.result()
        except trees.TooLargeError as error:
            raise SandboxFileError(f"{request['path']} is too large", reason="too_large") from error
        except tarfile.TarError:
            if fault is None:
                raise
        return (done, result), fault

    async def _files(self, request: dict[str, Any], fd: int) -> dict[str, Any]:
        """Have the warden do something with files; it gets `fd`, which is closed here. SandboxFileError."""
        results, result_end = pipes.pipe()
        path = request["path"]
        try:
            try:
                body = body_of({"user": None, **request, "path": self._absolute(path)})
                try:
                    answer = self._warden.ask("files", [body, fd, result_end])
                finally:
                    os.close(body)
            finally:
                os.close(fd)
                os.close(result_end)
            said = await pipes.read_all(results)
            await answer
        finally:
            os.close(results)
        if not said:
            raise SandboxFileError(f"{path}: it was interrupted, as by a kill in the sandbox", reason="EINTR")
        result: dict[str, Any] = _parse(said)
        if "error" in result:
            raise SandboxFileError(f"{path} in {self.name}: {result['text']}", reason=result["error"], path=path)
        return result

    # Its life

    def watch(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch_storage())

    async def _watch_storage(self) -> None:
        """Ends what runs when there is more on the disk than the limit."""
        wait = _LOOK_S
        with contextlib.suppress(SandboxGoneError):
            while True:
                await asyncio.sleep(wait)
                begun = time.monotonic()
                used = await self.storage_used()
                wait = max(_LOOK_S, 20 * (time.monotonic() - begun))
                if used > self.spec.limits.storage_mb * MIB:
                    self._storage_hit += 1
                    log.info("sandbox_storage_exceeded", sandbox=self.name, used_mb=used // MIB)
                    await self.kill()

    async def storage_used(self) -> int:
        """Bytes on the disk."""
        reader, writer = pipes.pipe()
        try:
            try:
                answer = self._warden.ask("usage", [writer])
            finally:
                os.close(writer)
            said = await pipes.read_all(reader)
            await answer
        finally:
            os.close(reader)
        return int(_parse(said)["size"]) if said else 0

    async def destroy(self) -> None:
        if self._destroyed is None:
            self._destroyed = asyncio.ensure_future(self._destroy())
        await asyncio.shield(self._destroyed)

    async def _destroy(self) -> None:
        self._ended = time.monotonic()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._proxy is not None:
            await self._proxy.stop()
        ended = await self._warden.end(_END_S)
        for stray in list(self._strays):
            stray.cancel()
        if self._strays:
            await asyncio.wait(list(self._strays))
        await self._provider.remove(self, self._claim)
        if not ended:
            raise SandboxTeardownError(f"processes of {self.name} do not end")

    def cost(self) -> float:
        hours = ((self._ended or time.monotonic()) - self._started) / 3600
        limits = self.spec.limits
        return hours * (limits.cpus * self._price.cpu_hour + limits.memory_mb / 1024 * self._price.gib_hour)


def _parse(data: bytes) -> dict[str, Any]:
    return json.loads(data)


def _unpack(stream: BinaryIO, target: Path, max_bytes: int) -> trees.Moved | None:
    try:
        return trees.unpack(stream, str(target), leave=False, max_bytes=max_bytes)
    except tarfile.ReadError:  # cut off: the other side failed, and says why
        return None


class _Running:
    """One command: its pipes and its end."""

    def __init__(
        self,
        warden: Warden,
        body: Mapping[str, Any],
        stdin: bytes | AsyncIterator[bytes] | None,
        captures: Mapping[Stream, Capture],
        on_output: OnOutput | None,
    ) -> None:
        self._captures = captures
        self._on_output = on_output
        self.answer: dict[str, Any] = {}
        self._stdin = -1
        self._outputs: dict[Stream, int] = {}
        passed: list[int] = []
        try:
            passed.append(body_of(body))
            if stdin is None:
                passed.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            else:
                reader, self._stdin = pipes.pipe()
                passed.append(reader)
            for stream in captures:
                reader, writer = pipes.pipe()
                self._outputs[stream] = reader
                passed.append(writer)
            self._ended = warden.ask("exec", passed)
        except BaseException:
            self._close()
            raise
        finally:
            for fd in passed:
                os.close(fd)
        self._input = asyncio.ensure_future(self._send(stdin)) if stdin is not None else None
        self._pumps = [asyncio.ensure_future(self._pump(stream)) for stream in captures]

    def _close(self) -> None:
        for fd in (self._stdin, *self._outputs.values()):
            if fd >= 0:
                os.close(fd)
        self._stdin = -1
        self._outputs = {}

    async def _send(self, source: bytes | AsyncIterator[bytes]) -> None:
        try:
            await pipes.write_all(self._stdin, source)
        finally:
            os.close(self._stdin)
            self._stdin = -1

    async def _pump(self, stream: Stream) -> None:
        def feed(data: bytes) -> Any:
            self._captures[stream].feed(data)
            return self._on_output(stream, data) if self._on_output else None

        await pipes.read_until(self._outputs[stream], self._ended, feed)

    async def finish(self) -> None:
        """Until the command has ended and what it printed is read. What `on_output` or stdin's source raises, too."""
        waited: set[asyncio.Future[Any]] = {*self._pumps, self._ended}
        if self._input is not None:
            waited.add(self._input)
        while not self._ended.done() or any(not pump.done() for pump in self._pumps):
            done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        self.answer = self._ended.result()

    async def drain(self) -> None:
        """After everything was killed."""
        await asyncio.wait([self._ended])
        await asyncio.wait(self._pumps, timeout=_DRAIN_S)  # `on_output` may be stuck
        self.answer = self._ended.result()

    async def discard(self) -> None:
        """Read on and forget, until nobody can print any more."""
        try:
            waited = [*self._pumps, *([self._input] if self._input else [])]
            for task in waited:
                task.cancel()
            await asyncio.wait(waited)
            outputs = [pipes.read_until(fd, None, lambda _: None) for fd in self._outputs.values()]
            await asyncio.gather(*outputs)
        finally:
            self._close()
