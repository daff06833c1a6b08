"""`[telemetry]` of commands started here, from `./rollout.toml` and the environment."""

from __future__ import annotations

from pathlib import Path

from rollout.config.load import load_settings
from rollout.config.settings import TelemetryFile, TelemetrySection
from rollout.telemetry.spans import check_installed

CLIENT_FILE = Path("rollout.toml")


def client_telemetry() -> TelemetrySection:
    """Return the section. Raises ConfigError, also if traces are enabled and packages for them are missing."""
    section = load_settings(TelemetryFile, CLIENT_FILE if CLIENT_FILE.is_file() else None).telemetry
    check_installed(section)
    return section
