"""What a sandbox of a task begins with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from rollout.workloads.job.task import Environment

from rollout_worker.sandboxes.port import Host, Image, Provider, Root, Sandbox
from rollout_worker.trials.port import TrialFault

DOCKERFILE = "Dockerfile"
_WORKDIR = "/app"


@dataclass(frozen=True, slots=True)
class Prepared:
    """`workdir` None: what the root says. `replay`: what is still to be done in the new sandbox. `key`: equal for
    sandboxes that begin with the same files. `remarks`: a sentence each, of what is not as the task wants it."""

    root: Root
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    remarks: tuple[str, ...] = ()
    replay: Callable[[Sandbox], Awaitable[None]] | None = None
    key: str = ""


async def prepare(environment: Environment, task_directory: Path, provider: Provider) -> Prepared:
    """The root for `environment`. TrialFault: it cannot be had."""
    roots = (await provider.probe()).roots
    if environment.docker_image is not None:
        if "image" not in roots:
            raise TrialFault(
                "environment_image_pull_failed",
                f"the provider {provider.name} cannot begin with the image {environment.docker_image}",
            )
        return Prepared(Image(environment.docker_image), environment.workdir, key=environment.docker_image)
    if "host" not in roots:
        raise TrialFault("environment_build_failed", f"the provider {provider.name} cannot build a Dockerfile")
    build = environment.build or ""
    remark = f"{build}/{DOCKERFILE} was not built: the sandbox has the programs of the worker's host"
    return Prepared(
        Host(),
        environment.workdir or _WORKDIR,
        remarks=(remark,) if (task_directory / build / DOCKERFILE).is_file() else (),
        key="host",
    )
