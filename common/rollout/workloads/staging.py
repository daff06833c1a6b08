"""Where on this machine the directory of a run is whose output is a bucket.

Results are collected there as in any output directory, and uploaded from there. The place depends on the URL alone, so
that the next command finds the run, and the ledger of its private cluster, again.
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
    """Of this account: what must outlive a command. A relative path is invalid by the XDG specification."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "rollout"


def cache_home() -> Path:
    """Of this account: what may be deleted at any time."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "rollout"


def output_bucket(output: str) -> BucketUrl | None:
    """The place in a bucket that an output names, with a slash at its end; None: it is a path. ConfigError."""
    url = parse_url(output)
    if url is None:
        return None
    place = url.directory
    if any(part in ("", ".", "..") or has_wildcard(part) for part in place.key.split("/")[:-1]):
        raise ConfigError(f"{output}: names in it must not be empty, . or .., and without wildcards")
    return place


def staging_directory(place: BucketUrl) -> Path:
    """Of the run whose output is `place`. ConfigError."""
    try:
        home = state_home()
    except RuntimeError as error:
        raise ConfigError(
            f"output.dir: {place}: this account has no home to collect results in: set XDG_STATE_HOME to a directory"
        ) from error
    return home / _OUTPUTS / blake3(str(place).encode()).hexdigest()[:_DIGITS] / place.name


def is_staging(directory: Path) -> bool:
    """Whether it is that of some output in a bucket."""
    with suppress(RuntimeError, OSError):
        return directory.resolve().is_relative_to((state_home() / _OUTPUTS).resolve())
    return False
