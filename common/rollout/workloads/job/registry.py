"""registry.json: datasets by name and version, each a list of tasks in git repositories or next to the file."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from rollout.config.wording import describe
from rollout.model.errors import InputError
from rollout.model.problems import problems

BYTES_MAX = 256 << 20
_TIMEOUT_S = 60.0


class _Entry(BaseModel):
    # Registries are others' files, and gain keys: what is not known changes nothing here.
    model_config = ConfigDict(extra="ignore", frozen=True)


class RegistryTask(_Entry):
    """`path` is relative to the repository; without `git_url`, to the directory of registry.json."""

    name: str = Field(min_length=1)
    git_url: str | None = None
    git_commit_id: str | None = None
    path: str = ""


class RegistryDataset(_Entry):
    name: str = Field(min_length=1)
    version: str = ""
    description: str = ""
    tasks: list[RegistryTask] = Field(default_factory=list[RegistryTask])
    metrics: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])


_DATASETS = TypeAdapter(list[RegistryDataset])


def read_registry(path: Path) -> list[RegistryDataset]:
    """Read a registry. Raises InputError if it is unreadable, or with all faults."""
    try:
        return parse_registry(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def fetch_registry(url: str) -> list[RegistryDataset]:
    """Fetch a registry, with retries. Raises InputError if that fails, or with all faults."""
    try:
        return parse_registry(_fetch(url), url)
    except urllib.error.HTTPError as error:
        raise InputError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise InputError(f"{url}: cannot be fetched: {why}") from error


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return isinstance(error, OSError)


@retry(
    retry=retry_if_exception(_may_pass), stop=stop_after_attempt(3), wait=wait_exponential(multiplier=0.5), reraise=True
)
def _fetch(url: str) -> bytes:
    if not url.startswith(("http://", "https://")):  # urllib would open file: and ftp: too
        raise InputError(f"{url}: must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            data = cast("bytes", answer.read(BYTES_MAX + 1))
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    if len(data) > BYTES_MAX:
        raise InputError(f"{url}: larger than {BYTES_MAX >> 20} MiB")
    return data


def parse_registry(data: bytes, where: str) -> list[RegistryDataset]:
    """Parse a registry. `where` begins every fault."""
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    try:
        return _DATASETS.validate_python(value, strict=True)
    except ValidationError as error:
        raise InputError(
            problems(
                f"{where}: {_place(value, entry['loc'])}{describe(cast('Any', entry), '', 'an object')}"
                for entry in error.errors(include_url=False)[:100]
            )
        ) from error


def _place(value: Any, loc: Sequence[int | str]) -> str:
    """Return `dataset "a": task "b": key: `, with the names of the enclosing entries."""
    parts = list[str]()
    for key, kind in zip(loc[::2], ("dataset", "task"), strict=False):
        if not isinstance(key, int):
            break
        value = value[key]
        name: Any = cast("Any", value).get("name") if isinstance(value, dict) else None
        parts.append(f'{kind} "{name}"' if isinstance(name, str) else f"{kind} {key + 1}")
        value = cast("Any", value).get("tasks") if isinstance(value, dict) else None
    rest = [str(key) for key in loc[2 * len(parts) - 1 :]]
    return "".join(f"{part}: " for part in [*parts, *([".".join(rest)] if rest else [])])


def find_dataset(datasets: Sequence[RegistryDataset], name: str, version: str | None, where: str) -> RegistryDataset:
    """Return the dataset `name` with `version`, by default "head" or else the highest. Raises InputError with the
    versions that exist."""
    named = [dataset for dataset in datasets if dataset.name == name]
    if not named:
        known = sorted({dataset.name for dataset in datasets})
        near = get_close_matches(name, known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"it has {', '.join(known[:20]) or 'none'}"
        raise InputError(f'{where}: there is no dataset "{name}"; {hint}')
    found = [dataset for dataset in named if version is None or dataset.version == version]
    if not found:
        versions = ", ".join(f'"{dataset.version}"' for dataset in named)
        raise InputError(f'{where}: there is no version "{version}" of {name}; it has {versions}')
    if version is not None and len(found) > 1:
        raise InputError(f'{where}: version "{version}" of {name} stands there {len(found)} times')
    return max(found, key=lambda dataset: (dataset.version == "head", _numbers(dataset.version)))


def _numbers(version: str) -> list[tuple[int, int, str]]:
    """Return a sort key: numbers by value, and after words ("1.10" is more than "1.9", "1.0" more than "1.0rc1")."""
    parts = re.findall(r"\d+|[a-zA-Z]+", version)
    return [(1, int(part), "") if part.isdigit() else (-1, 0, part) for part in parts] + [(0, 0, "")]
