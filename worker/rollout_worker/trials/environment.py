"""The start of a task's sandbox as a trial needs it: image, working directory, variables, user."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.workloads.job.task import Environment

from rollout_worker.sandboxes.errors import ImageBuildError, ImageBuildTimeoutError, ImageError, ImagePullError
from rollout_worker.sandboxes.images.prepare import Preparation, Prepared
from rollout_worker.sandboxes.images.replay import carry_out
from rollout_worker.sandboxes.images.store import Store
from rollout_worker.sandboxes.port import Host, Image, Limits, Provider, Sandbox
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.waits import Waits

WORKDIR = "/app"
_LATE_S = 30.0
"""Extra time for something that should end by itself at its time limit."""


@dataclass(frozen=True, slots=True)
class Images:
    """The image cache of this host, and the job's wishes: keys of `environment` in its file.

    `planned` has, by task directory and image, what the run's trials start with if nothing is to be built or fetched.
    """

    state: Path
    force_build: bool
    provider_config: Mapping[str, Any]
    shares_host: bool = False
    planned: dict[tuple[Path, str | None, str | None], Prepared] = field(
        default_factory=dict[tuple[Path, str | None, str | None], Prepared]
    )


async def prepare(
    environment: Environment, task_directory: Path, provider: Provider, how: Images, build_s: float, waits: Waits
) -> Prepared:
    """Build, fetch or plan the start of a sandbox. Raises TrialFault if that fails, or SandboxError."""
    key = task_directory, environment.docker_image, environment.build
    if key in how.planned:
        return how.planned[key]
    prepared = await _prepare(environment, task_directory, provider, how, build_s, waits)
    if (await provider.probe()).roots.isdisjoint(("rootfs", "image")):  # nothing was made that could go
        how.planned[key] = prepared
    return prepared


async def _prepare(
    environment: Environment, task_directory: Path, provider: Provider, how: Images, build_s: float, waits: Waits
) -> Prepared:
    try:
        async with asyncio.timeout(build_s + _LATE_S) as waits.deadline:
            return await Preparation(
                provider,
                Store(how.state),
                environment.docker_image,
                task_directory / environment.build if environment.build is not None else None,
                Limits.of(environment.cpus, environment.memory_mb, environment.storage_mb),
                build_s,
                how.force_build,
                how.shares_host,
                waits,
            ).run(how.provider_config.get("image", "auto"))
    except TimeoutError as error:
        raise _too_long(build_s) from error
    except ImageError as error:
        raise _fault(error) from error
    finally:
        waits.deadline = None


async def replay(
    prepared: Prepared,
    environment: Environment,
    task_directory: Path,
    sandbox: Sandbox,
    left_s: float,
    *,
    build_s: float,
) -> None:
    """Do the remaining set-up in a new sandbox, within the rest of `build_s`. Raises TrialFault or SandboxError."""
    if not prepared.replay:
        return
    try:
        async with asyncio.timeout(max(0.0, left_s) + _LATE_S):
            directory = task_directory / (environment.build or "")
            await carry_out(prepared.replay, sandbox, directory, max(0.0, left_s), build_s=build_s)
    except TimeoutError as error:
        raise _too_long(build_s) from error
    except ImageError as error:
        raise _fault(error) from error


def _too_long(seconds: float) -> TrialFault:
    return TrialFault("environment_build_timeout", f"the environment was not ready after {seconds:g} s")


def _fault(error: ImageError) -> TrialFault:
    if isinstance(error, ImageBuildTimeoutError):
        return TrialFault("environment_build_timeout", error.message)
    if isinstance(error, ImagePullError):
        return TrialFault("environment_image_pull_failed", error.message)
    type = "environment_build_failed" if isinstance(error, ImageBuildError) else "environment_start_failed"
    return TrialFault(type, error.message)


def workdir_of(environment: Environment, prepared: Prepared, *, is_host: bool) -> str | None:
    """Return the working directory of commands, or None if the image decides. `is_host` means that writes outside
    private directories go to the host, so its root is unsuitable."""
    named = environment.workdir or prepared.workdir
    if isinstance(prepared.root, Image):
        return named
    if named is None or (named == "/" and is_host and isinstance(prepared.root, Host)):
        return WORKDIR
    return named
