"""Finds installed backends by name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import cast

from rollout.model.errors import AttemptError

from rollout_worker.backends.port import Backend, BackendOptions


def open_backend(options: BackendOptions) -> Backend:
    """Open the backend registered under `options.kind`. Raises AttemptError (not retryable) if there is none."""
    registered = entry_points(group="rollout.backends")
    found = [entry for entry in registered if entry.name == options.kind]
    if not found:
        known = ", ".join(sorted({entry.name for entry in registered})) or "none"
        raise AttemptError(
            f"no backend {options.kind!r} is installed on this worker (installed: {known})",
            code="backend_missing",
            retry=False,
        )
    try:
        return cast(Backend, found[0].load()(options))
    except ImportError as error:
        raise AttemptError(
            f"backend {options.kind!r} cannot be imported on this worker: {error}: install its extra, "
            f"pip install 'rollout-engine[{options.kind}]'",
            code="backend_missing",
            retry=False,
        ) from error
