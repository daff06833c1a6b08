"""Asks the sandbox providers on this machine whether they accept a job's settings and find their engine. They are
loaded by name, because they belong to the worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout.config.adapters import load_adapter
from rollout.model.errors import ConfigError, RolloutError
from rollout.model.problems import faults_of
from rollout.workloads.job.config import SANDBOXES, EnvironmentSection
from rollout.workloads.job.network import NetworkMode

_KEY = "provider_config"
_OF_ENGINES = ("docker", "podman")
_LOCAL = ("process", "bubblewrap")
_IMAGES = ("pull", "build")
_OTHERS = ("bubblewrap", "docker", "podman")
"""Providers to suggest, if they work, when an engine is missing."""


def openness(environment: EnvironmentSection, *, here: bool) -> Iterator[str]:
    """Warn of sandboxes that isolate nothing, since a job may contain other people's tasks and agents. `here`: they run
    on this machine."""
    if environment.type != "process":
        return
    files = "the files of their worker's machine"
    if here:
        files = "this machine's files" + (" as root" if os.geteuid() == 0 else ", as you can")
    yield (
        f"warning: environment.type process: agents and tests can read and write {files}: only for tasks and "
        "agents that you trust; bubblewrap, docker and podman keep them apart"
    )


def settings_faults(environment: EnvironmentSection) -> Iterator[str]:
    """Yield faults of `provider_config`; none for a provider that this machine lacks, since its workers report them."""
    if ":" in environment.type:
        return
    with TemporaryDirectory() as state:
        try:
            _made(environment.type, Path(state), environment.provider_config)
        except ImportError:
            return
        except ConfigError as error:
            told = faults_of(error.message)
            yield from (f"environment.{fault}" for fault in told if fault.startswith(_KEY))


def engine_faults(environment: EnvironmentSection) -> Iterator[str]:
    """If no engine answers on this machine, or images cannot be had as asked for, yield the reason and a remedy."""
    needs_tools = environment.type == "bubblewrap" and environment.provider_config.get("image") in _IMAGES
    if environment.type in _OF_ENGINES or needs_tools:
        yield from refusals(environment)


def refusals(environment: EnvironmentSection) -> Iterator[str]:
    """If the provider cannot work on this machine, yield the reason and a remedy."""
    if ":" in environment.type:
        return
    why = refused(environment.type, environment.provider_config)
    if why:
        works = [name for name in _OTHERS if name != environment.type and not refused(name, {})]
        yield f"environment.type: {why}{_instead(works)}"


def network_faults(environment: EnvironmentSection, modes: Iterable[NetworkMode]) -> Iterator[str]:
    """Yield faults if this machine cannot provide the network that tasks need (`modes`), or share its own as the job
    asks."""
    if environment.type not in _LOCAL:
        if environment.network_mode == "host" and ":" not in environment.type:
            yield f"environment.network_mode: {environment.type} sandboxes do not share a network; leave it out"
        return
    if "public" not in modes or environment.network_mode == "host":
        return
    with TemporaryDirectory() as state, suppress(ImportError, RolloutError):  # why not is told by the worker
        found = asyncio.run(_open(environment.type, Path(state), environment.provider_config))
        if "public" not in found.networks:
            why = next((note for note in found.notes if "`public`" in note), "")
            yield f"environment.type: tasks want the network public, which {environment.type} cannot make here: {why}"


def _instead(works: list[str]) -> str:
    if not works:
        return (
            "; no other sandboxes work here either: process has none, for agents that you trust "
            "(environment: {type: process})"
        )
    others = "".join(f", and so does {name}" for name in works[1:])
    return f"; {works[0]} works here (environment: {{type: {works[0]}}}){others}"


def refused(name: str, config: dict[str, Any]) -> str:
    """Return why the provider cannot work on this machine, or ""."""
    with TemporaryDirectory() as state:
        try:
            asyncio.run(_open(name, Path(state), config))
        except ImportError as error:
            return f"the provider {name} is not installed here: {error}"
        except RolloutError as error:
            return error.message
    return ""


async def _open(name: str, state: Path, config: dict[str, Any]) -> Any:
    """Return what the provider can do here."""
    provider = _made(name, state, config)
    await provider.open()
    try:
        return await provider.probe()
    finally:
        await provider.close()


def _made(name: str, state: Path, config: dict[str, Any]) -> Any:
    return load_adapter(SANDBOXES, name, "environment.type")(state, config)
