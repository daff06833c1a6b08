"""Environment setup: makes a sandbox in which a task can start."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable

from rollout.cloud.shielded import to_the_end
from rollout.workloads.experiment.contracts import CONTRACT
from rollout.workloads.job.config import EnvironmentSection
from rollout.workloads.job.network import NetworkPolicy
from rollout.workloads.job.task import Environment

from rollout_worker.sandboxes.claims import Capacity
from rollout_worker.sandboxes.errors import SandboxError, SandboxRefusedError
from rollout_worker.sandboxes.images.prepare import create
from rollout_worker.sandboxes.port import Capabilities, Host, Sandbox, Spec
from rollout_worker.trials.environment import prepare, replay, workdir_of
from rollout_worker.trials.faults import faults
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.times import Times
from rollout_worker.trials.told import Told
from rollout_worker.trials.waits import Waits
from rollout_worker.trials.wanted import limits_of, network_of, spec_of, unmet

LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
CONTRACT_ROOT = str(PurePosixPath(CONTRACT).parent)
_SETUP_S = 60.0
_BACKGROUND = '{ "$0" "$@" & } < /dev/null > /tmp/rollout-entrypoint.log 2>&1'
_FOREVER = "while :; do sleep 3600; done"
_ROOT = (None, "root", "0")
_SHARED = "the sandbox had the worker's network, with all that listens there, other trials' services included"


@dataclass(frozen=True, slots=True)
class Wish:
    """A sandbox to make: `policies` of all phases in it, `users` of all commands (None is the default), `build_s`, the
    time limit for its image, and `phase`, the one shown to users meanwhile."""

    environment: Environment
    policies: Sequence[NetworkPolicy]
    env: Mapping[str, str]
    users: Sequence[str | None]
    build_s: float
    phase: str


@dataclass(frozen=True, slots=True)
class Made:
    """A new sandbox. Commands run in `workdir`. `image_key` is equal for sandboxes that start with the same files.
    `remarks` are sentences about differences from what the task wants. `user` runs commands if the task names nobody,
    None is root."""

    sandbox: Sandbox
    workdir: str
    image_key: str
    remarks: tuple[str, ...]
    user: str | None = None
    entrypoint: tuple[str, ...] = ()

    def is_root(self, user: str | None) -> bool:
        """Return whether the task's commands of `user` run as root."""
        return (user or self.user) in _ROOT

    async def start_entrypoint(self) -> None:
        """Start the image's entrypoint in the background, unless the engine does. Raises SandboxError."""
        if not self.entrypoint:
            return
        command = ["/bin/sh", "-c", _BACKGROUND, *self.entrypoint, "/bin/sh", "-c", _FOREVER]
        await self.sandbox.exec(command, cwd=self.workdir, timeout_s=_SETUP_S)

    async def kill(self) -> None:
        """End every process in it, and restart its entrypoint. Raises SandboxError."""
        await self.sandbox.kill()
        await self.start_entrypoint()


async def make_sandbox(told: Told, wish: Wish, times: Times, *, room_s: float | None = None) -> Made:
    """Make a sandbox that is ready, with the directories of a task. Waiting for others is recorded in `times`.

    `room_s` limits the wait for room. Raises TrialFault.
    """
    job, provider, directory = told.job.environment, told.provider, told.task.directory
    began, waits = time.monotonic(), Waits(times, told.progress, wish.phase)
    with faults("environment_start_failed", "the provider was asked what it can do"):
        capabilities = await provider.probe()
    with faults("environment_build_failed", "the environment was built"):
        wanted = _with_overrides(wish.environment, job)
        prepared = await prepare(wanted, directory, provider, told.images, wish.build_s, waits)
        capabilities = await provider.probe()  # engines are tried out with the first image that they have
    if told.contract is not None:
        of_nobody = told.contract.input.policy.sandbox.image is None  # its Dockerfile was generated
        remarks = () if of_nobody else prepared.remarks
        prepared = replace(prepared, directories=(*prepared.directories, CONTRACT_ROOT), remarks=remarks)
    left_s = wish.build_s - (time.monotonic() - began) + waits.seconds
    network = network_of(wish.policies, job.extra_allowed_hosts, shares_host=job.network_mode == "host")
    workdir = workdir_of(wish.environment, prepared, is_host=not capabilities.writable_root)
    mount = told.task.dialect.solution_mount
    spec = spec_of(wish.environment, job, prepared, network, wish.env, mount, workdir)
    if (fault := unmet(wish.environment, job, spec, capabilities)) is not None:
        raise fault
    _check_paths(told, spec, capabilities)
    _check_users(wish, capabilities)
    sandbox = await _create(told, spec, room_s, waits)
    try:
        with faults("environment_build_failed", "the environment was built"):
            await replay(prepared, wish.environment, directory, sandbox, left_s, build_s=wish.build_s)
        workdir = workdir or sandbox.workdir
        await _lay_out(sandbox, workdir, [user or prepared.user for user in wish.users])
        for user in {user for user in wish.users if user is not None}:
            await _check_user(sandbox, user)
        made = Made(sandbox, workdir, prepared.image_key, (), prepared.user, prepared.entrypoint)
        with faults("environment_start_failed", "the ENTRYPOINT of its image was started"):
            await made.start_entrypoint()
    except BaseException:
        await to_the_end(sandbox.destroy())
        raise
    remarks = (*prepared.remarks, *([_SHARED] if network.mode == "host" else []))
    if waits.seconds and (crowded := _crowded(told, spec)):
        remarks = (*remarks, crowded)
    return replace(made, remarks=remarks)


def _with_overrides(environment: Environment, job: EnvironmentSection) -> Environment:
    limits = limits_of(environment, job)
    changes = {"cpus": limits.cpus, "memory_mb": limits.memory_mb, "storage_mb": limits.storage_mb}
    return environment.model_copy(update=changes)


@runtime_checkable
class _OnHost(Protocol):
    """A provider whose sandboxes share one machine's resources."""

    @property
    def capacity(self) -> Capacity: ...


def _crowded(told: Told, spec: Spec) -> str:
    """Return a remark if this host cannot hold as many sandboxes as the job wants trials at once."""
    if not isinstance(told.provider, _OnHost):
        return ""
    has, one, wanted = told.provider.capacity, spec.limits, told.job.n_concurrent_trials
    by_cpus, by_memory = int((has.cpus + 1e-9) / one.cpus), has.memory_mb // one.memory_mb
    if min(by_cpus, by_memory) >= wanted:
        return ""
    has_of = f"{has.cpus:g} cpus" if by_cpus <= by_memory else f"{has.memory_mb} MiB of memory"
    needs = f"{one.cpus:g}" if by_cpus <= by_memory else f"{one.memory_mb} MiB"
    key = "n_concurrent_trials" if told.contract is None else "design.max_concurrency"
    return (
        f"this host has room for {min(by_cpus, by_memory)} of these trials at once: {has_of}, and each declares "
        f"{needs}; {key} is {wanted}, and the others wait"
    )


async def _create(told: Told, spec: Spec, room_s: float | None, waits: Waits) -> Sandbox:
    try:
        async with asyncio.timeout(room_s):
            return await create(told.provider, spec, waits)
    except TimeoutError as error:
        raise TrialFault("environment_start_failed", f"there was no room for it after {room_s:g} s") from error
    except SandboxRefusedError as error:
        raise TrialFault("environment_resource_allocation_failed", error.message) from error
    except SandboxError as error:
        raise TrialFault("environment_start_failed", error.message) from error


async def _lay_out(sandbox: Sandbox, workdir: str, users: Sequence[str | None]) -> None:
    wanted = [*LOGS, workdir]
    script = f"mkdir -p {' '.join(map(shlex.quote, wanted))}"
    if any(user not in _ROOT for user in users):
        # Who is not root must be able to leave something there; of an image, its workdir is as its maker wanted it.
        open_to_all = wanted if isinstance(sandbox.spec.root, Host) and workdir != "/" else LOGS
        script += f" && chmod 0777 {' '.join(map(shlex.quote, open_to_all))}"
    with faults("environment_start_failed", "its directories were made"):
        finished = await sandbox.exec(script, cwd="/", user=admin(sandbox), timeout_s=_SETUP_S)
    if not finished.ok:
        raise TrialFault(
            "environment_start_failed",
            f"directories cannot be made in it: {finished.stderr.text()[-500:].strip() or finished.how}",
        )


async def _check_user(sandbox: Sandbox, user: str) -> None:
    """Check that the user exists; otherwise it would look like a command that failed."""
    with faults("environment_start_failed", f"its user {user} was tried"):
        tried = await sandbox.exec(["/bin/sh", "-c", "exit 0"], cwd="/", user=user, timeout_s=_SETUP_S)
    if not tried.ok:
        said = tried.stderr.text().strip()[-300:]
        raise TrialFault("environment_start_failed", f"no command can run as user {user} in it: {said}")


def admin(sandbox: Sandbox) -> str | None:
    """Return the user with full rights in the sandbox."""
    return "root" if sandbox.capabilities.users else None


def _check_paths(told: Told, spec: Spec, capabilities: Capabilities) -> None:
    """Prevent writes to the host itself if a sandbox shares its root."""
    if capabilities.writable_root or not isinstance(spec.root, Host):
        return
    path = told.job.instruction_path
    if not any(path.startswith(f"{directory}/") for directory in spec.directories):
        raise TrialFault(
            "environment_start_failed",
            f"instruction_path {path} is in none of the directories that are the sandbox's own: "
            f"{', '.join(spec.directories)}",
        )


def _check_users(wish: Wish, capabilities: Capabilities) -> None:
    if capabilities.users:
        return
    others = sorted({user for user in wish.users if user is not None and user not in ("root", "0")})
    if others:
        raise TrialFault(
            "environment_start_failed",
            f"the task wants commands run as {', '.join(others)}, and this provider knows one user only here",
        )
