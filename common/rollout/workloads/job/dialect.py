"""The differences between the two formats of task directories, in one table with a row for each.

Both formats are read by the same keys. Defaults, and the meaning of a verifier's exit code or an agent's timeout,
depend on the version that task.toml names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DialectName = Literal["rollout", "harbor"]
NEWEST = (1, 4)
"""The newest supported `schema_version`."""
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\.\d{1,4})?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """A row of the table. Times are in seconds, memory and storage in MiB; None means no limit, or the provider's
    default."""

    name: DialectName
    exit_code_counts: bool
    """Whether a test script that exits with another code than 0 is `verifier_failed`, whatever reward it wrote."""
    verifies_after_agent_error: bool
    """Whether the verifier runs even if the agent timed out or exited with another code than 0."""
    keeps_processes: bool
    """Whether processes that the agent left keep running during verification; otherwise they are ended before."""
    several_rewards: bool
    """Whether reward.json may hold an object of several named rewards; otherwise one number, or {"reward": number}."""
    truth_is_number: bool
    """Whether true and false in reward.json mean 1 and 0; otherwise they are invalid."""
    solution_mount: str
    """Path of the reference solution in the oracle agent's sandbox."""
    agent_timeout_s: float | None
    install_timeout_s: float
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None


ROLLOUT = Dialect(
    name="rollout",
    exit_code_counts=True,
    verifies_after_agent_error=False,
    keeps_processes=False,
    several_rewards=False,
    truth_is_number=False,
    solution_mount="/oracle",
    agent_timeout_s=600.0,
    install_timeout_s=300.0,
    cpus=1.0,
    memory_mb=2048,
    storage_mb=10240,
)
HARBOR = Dialect(
    name="harbor",
    exit_code_counts=False,
    verifies_after_agent_error=True,
    keeps_processes=True,
    several_rewards=True,
    truth_is_number=True,
    solution_mount="/solution",
    agent_timeout_s=None,
    install_timeout_s=360.0,
    cpus=None,
    memory_mb=None,
    storage_mb=None,
)
DIALECTS: dict[DialectName, Dialect] = {dialect.name: dialect for dialect in (ROLLOUT, HARBOR)}


def version_of(version: str | None, schema_version: str | None) -> tuple[str, Dialect]:
    """Return (version, dialect) of a task.toml with these two keys.

    `schema_version` is Harbor's key, and `version` its old name, which Rollout's task files have kept: up to 1.0 a file
    that says `version` may have either format (`settled_by`) and is read as Rollout's; every other one is Harbor's, of
    the newest version if none is named. Raises ValueError if the two keys disagree, or the version is newer than NEWEST
    or not a version.
    """
    if version is not None and schema_version is not None and version != schema_version:
        raise ValueError(f'version "{version}" and schema_version "{schema_version}" disagree: keep schema_version')
    named = schema_version if schema_version is not None else version
    if named is None:
        return ".".join(map(str, NEWEST)), HARBOR
    match = _VERSION.fullmatch(named)
    if match is None:
        raise ValueError(f'must be a version such as "1.0", not "{named[:40]}"')
    number = int(match[1]), int(match[2])
    if number > NEWEST:
        newest = ".".join(map(str, NEWEST))
        raise ValueError(f'"{named}" is newer than {newest}, the newest version that is known here: upgrade rollout')
    return named, ROLLOUT if schema_version is None and number <= (1, 0) else HARBOR


_ONLY_HARBOR: Mapping[str, tuple[str, ...]] = {
    "environment": ("memory_mb", "storage_mb", "allow_internet", "network_mode", "allowed_hosts", "healthcheck"),
    "metadata": ("author_name", "author_email", "expert_time_estimate_min", "junior_time_estimate_min"),
    "verifier": ("environment_mode", "environment", "collect", "network_mode"),
    "agent": ("network_mode", "allowed_hosts"),
}
_ONLY_ROLLOUT: Mapping[str, tuple[str, ...]] = {"agent": ("install_timeout_sec",)}


def settled_by(values: Mapping[str, Any]) -> DialectName | None:
    """Return the format of a task.toml with these keys, or None if they do not show which of the two it is.

    The key `dialect` names it, else the version, else a key that only one of them has.
    """
    if "dialect" in values:
        return values["dialect"]
    if version_of(values.get("version"), values.get("schema_version"))[1] is HARBOR:
        return "harbor"
    only: dict[DialectName, Mapping[str, tuple[str, ...]]] = {"harbor": _ONLY_HARBOR, "rollout": _ONLY_ROLLOUT}
    formats: list[DialectName] = [
        name for name, marks in only.items() if any(set(keys) & set(values.get(at, {})) for at, keys in marks.items())
    ]
    return formats[0] if len(formats) == 1 else None


def unsettled(where: str, count: int, first: str) -> str:
    """Return the fault of `count` tasks in `where` that do not name their format. `first` is one of them."""
    tasks = f"{first} says" if count == 1 else f"{count:,} tasks, {first} among them, say"
    return (
        f"{where}: {tasks} version = \"1.0\", which Rollout's format and Harbor's both have, and which they score "
        "differently: name the format as dialect: harbor or dialect: rollout of the dataset or the task in job.yaml "
        '(or as --dialect), or as dialect = "harbor" or "rollout" in task.toml'
    )
