"""The local directory of a run whose output is a bucket.

Results are collected there as in any output directory, and uploaded from there. Its path depends on the URL alone, so
the next command finds the run, and the ledger of its private cluster, again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from rollout.cloud.url import BucketUrl, has_wildcard, parse_url
from rollout.model.errors import ConfigError

_DIGITS = 12
_OUTPUTS = "outputs"


def state_home() -> Path:
    """Return this account's directory for data that outlives a command. The XDG specification ignores relative
    paths."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "rollout"


def cache_home() -> Path:
    """Return this account's directory for data that may be deleted at any time."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "rollout"


def output_bucket(output: str) -> BucketUrl | None:
    """Return the bucket of an output, with a slash at its end, or None if it is a path. Raises ConfigError."""
    url = parse_url(output)
    if url is None:
        return None
    place = url.directory
    if any(part in ("", ".", "..") or has_wildcard(part) for part in place.key.split("/")[:-1]):
        raise ConfigError(f"{output}: names in it must not be empty, . or .., and without wildcards")
    return place


def staging_directory(place: BucketUrl) -> Path:
    """Return the directory of the run whose output is `place`. Raises ConfigError."""
    try:
        home = state_home()
    except RuntimeError as error:
        raise ConfigError(
            f"output.dir: {place}: this account has no home to collect results in: set XDG_STATE_HOME to a directory"
        ) from error
    return home / _OUTPUTS / blake3(str(place).encode()).hexdigest()[:_DIGITS] / place.name


def is_staging(directory: Path) -> bool:
    """Return whether it belongs to an output in a bucket."""
    with suppress(RuntimeError, OSError):
        return directory.resolve().is_relative_to((state_home() / _OUTPUTS).resolve())
    return False
