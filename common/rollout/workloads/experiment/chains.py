"""Chains that continue in another run: restores the workspace that a trial left, from the files of its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path

from rollout.model.errors import ConfigError
from rollout.workloads.experiment.freezing import freeze
from rollout.workloads.experiment.inheriting import link
from rollout.workloads.experiment.layout import artifact_path, trial_directory
from rollout.workloads.json_form import JsonObject

_STATE = "evidence/chain.json"
_KEY = "policy.state_policy"


def freeze_states(
    run: Path, rows: Iterable[JsonObject], wanted: Collection[str | None], scratch: Path
) -> dict[str, tuple[str, Path]]:
    """Return, for each `wanted` chain, (content id in hex, directory below `scratch`) of the next trial's start, as a
    worker takes it from a predecessor's files. `rows` are those of CHAINS in `run`, in order; the last of a chain
    counts. Raises ConfigError if something is missing in `run`. Blocking."""
    last = {row["chain_id"]: row["trial_id"] for row in rows if row["chain_id"] in wanted}
    return {chain: _freeze(run, trial, scratch / "chains" / trial, scratch) for chain, trial in last.items()}


def _freeze(run: Path, trial: str, directory: Path, scratch: Path) -> tuple[str, Path]:
    path = run / trial_directory(trial) / _STATE
    try:
        state = json.loads(path.read_bytes())
        (directory / _STATE).parent.mkdir(parents=True, exist_ok=True)
        link(path, directory / _STATE)
        for name in ("start_ref", "post_ref"):
            manifest: JsonObject = json.loads(_bring(run, directory, state[name].rpartition("/")[2]).read_bytes())
            for entry in manifest["entries"]:
                if entry["type"] == "file":
                    _bring(run, directory, entry["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{_KEY}: the workspace that {trial} of {run} left cannot be had: {error}") from error
    return freeze(_KEY, directory, scratch)


def _bring(run: Path, directory: Path, digest: str) -> Path:
    """Copy an artifact. Raises ValueError if its content does not match its name."""
    source = run / artifact_path(digest)
    target = directory / artifact_path(digest)
    if not target.exists():
        with source.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{source} was edited")
        target.parent.mkdir(parents=True, exist_ok=True)
        link(source, target)
    return target
