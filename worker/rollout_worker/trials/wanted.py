"""The sandbox that a task and its job ask for, and why this provider cannot provide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.workloads.job.config import EnvironmentSection
from rollout.workloads.job.network import NetworkPolicy
from rollout.workloads.job.task import Environment

from rollout_worker.sandboxes.allowlist import names_among
from rollout_worker.sandboxes.images.prepare import Prepared
from rollout_worker.sandboxes.port import (
    TASK_DIRECTORIES,
    Capabilities,
    Host,
    LimitName,
    Limits,
    Mount,
    Network,
    Spec,
)
from rollout_worker.trials.port import TrialFault


def limits_of(environment: Environment, job: EnvironmentSection) -> Limits:
    """Return the limits; where neither sets one, the port's default."""
    cpus = job.override_cpus if job.override_cpus is not None else environment.cpus
    memory = job.memory_mb or environment.memory_mb
    if job.cpu_enforcement_policy == "ignore":
        cpus = None
    if job.memory_enforcement_policy == "ignore":
        memory = None
    return Limits.of(cpus, memory, job.storage_mb or environment.storage_mb)


def network_of(policies: Sequence[NetworkPolicy], extra_hosts: Sequence[str], *, shares_host: bool = False) -> Network:
    """Return the single network of all phases in the sandbox. Raises TrialFault if they need different ones.

    `shares_host` uses the worker's network if a public one is wanted.
    """
    if len(set(policies)) > 1:
        shown = ", ".join(sorted({policy.mode for policy in policies}))
        raise TrialFault(
            "environment_start_failed",
            f"the phases of this task want different networks ({shown}) in one sandbox, whose network cannot be changed"
            ": give [environment], [agent] and [verifier] the same, or the verifier environment_mode = "
            '"separate"',
        )
    policy = policies[0]
    if policy.mode == "public":
        names = names_among(extra_hosts)  # which are reached anyway
        return Network("host") if shares_host else Network("public", tuple(h for h in extra_hosts if h not in names))
    hosts = tuple(dict.fromkeys((*policy.allowed_hosts, *extra_hosts)))
    return Network("allowlist", hosts) if hosts else Network("none")


def directories_of(prepared: Prepared, solution_mount: str, workdir: str | None) -> tuple[str, ...]:
    """Return directories that are private to the sandbox: empty, or with the image's content."""
    wanted = [*TASK_DIRECTORIES, solution_mount, *prepared.directories]
    if isinstance(prepared.root, Host) and workdir != "/" and not _is_below(workdir, wanted):
        wanted.append(str(workdir))
    return tuple(dict.fromkeys(wanted))


def _is_below(path: str | None, directories: Sequence[str]) -> bool:
    return path is None or any(path == directory or path.startswith(f"{directory}/") for directory in directories)


def spec_of(
    environment: Environment,
    job: EnvironmentSection,
    prepared: Prepared,
    network: Network,
    env: Mapping[str, str],
    solution_mount: str,
    workdir: str | None,
) -> Spec:
    """Return the spec. Raises TrialFault if no sandbox can be requested like this."""
    require: set[LimitName] = set()
    if job.cpu_enforcement_policy in ("limit", "guarantee"):
        require.add("cpus")
    if job.memory_enforcement_policy in ("limit", "guarantee"):
        require.add("memory")
    return Spec(
        root=prepared.root,
        limits=limits_of(environment, job),
        network=network,
        directories=directories_of(prepared, solution_mount, workdir),
        mounts=tuple(_mounts(job.mounts)),
        env={**prepared.env, **env},
        workdir=None if workdir == "/" else workdir,  # that is no directory of a sandbox's own
        user=prepared.user,
        require=frozenset(require),
    )


def _mounts(mounts: Sequence[Mapping[str, Any]]) -> Iterator[Mount]:
    for mount in mounts:
        source, target = mount.get("source"), mount.get("target")
        if mount.get("type", "bind") != "bind" or not isinstance(source, str) or not isinstance(target, str):
            raise TrialFault(
                "environment_start_failed",
                f"environment.mounts: {dict(mount)} is no mount that sandboxes have: type bind, source and target",
            )
        yield Mount(Path(source), target, bool(mount.get("read_only", False)))


def unmet(
    environment: Environment, job: EnvironmentSection, spec: Spec, capabilities: Capabilities
) -> TrialFault | None:
    """Return why this provider cannot provide the sandbox, besides its limits and its room."""
    gpus = job.override_gpus if job.override_gpus is not None else environment.gpus
    if gpus or environment.tpu or job.override_tpu:
        what = f"{gpus} GPUs" if gpus else "a TPU"
        return TrialFault(
            "environment_resource_allocation_failed",
            f"the task wants {what}, which sandboxes here do not have: environment.override_gpus sets another number",
        )
    if environment.os != "linux":
        return TrialFault("environment_start_failed", f"the task wants {environment.os}, and sandboxes here are Linux")
    lacking: list[str] = []
    if spec.network.mode not in capabilities.networks:
        lacking.append(f"make the network that the task wants ({spec.network.mode})")
    if not capabilities.private_directories:
        lacking.append(f"make {', '.join(spec.directories)} private")
    if lacking:
        notes = f" ({'; '.join(capabilities.notes)})" if capabilities.notes else ""
        return TrialFault("environment_start_failed", f"this provider cannot {' and '.join(lacking)} here{notes}")
    return None
