"""Check, before anything starts, that the packages of a provider are installed."""

from __future__ import annotations

from importlib.util import find_spec

from rollout.config.cloud import CloudSection
from rollout.model.errors import ConfigError

_MODULES = {"aws": ("aiobotocore",), "gcp": ("gcloud.aio.auth", "aiohttp")}


def check_installed(cloud: CloudSection) -> None:
    """Raise ConfigError with the install command if a package is missing. Nothing is imported."""
    missing = [name for name in _MODULES.get(cloud.provider, ()) if not _is_there(name)]
    if missing:
        raise ConfigError(
            f'cloud.provider: "{cloud.provider}" needs packages that are not installed ({", ".join(missing)}): '
            f"pip install 'rollout-engine[{cloud.provider}]'"
        )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
