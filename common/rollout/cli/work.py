"""Request to a workload's command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rollout.cli.progress import Display
from rollout.cli.work_options import Options
from rollout.client.target import Target
from rollout.workloads.arriving_rows import queued_input
from rollout.workloads.port import Workload
from rollout.workloads.sections import QueuedInput

PATIENCE_S = 900.0
"""A run outlives a coordinator that is being repaired."""
FIRST_PATIENCE_S = 20.0
"""An address that never answered a new run is probably wrong."""


@dataclass(frozen=True, slots=True)
class Work:
    """Workload, settings and options of a command. `target` is the cluster of its run."""

    workload: Workload[Any, Any]
    settings: BaseModel
    options: Options
    target: Target
    display: Display

    @property
    def directory(self) -> Path:
        """Output directory as it was given."""
        return self.workload.directory(self.settings)

    @property
    def is_private(self) -> bool:
        """Whether the cluster is the command's own."""
        return self.target.private is not None

    @property
    def followed(self) -> QueuedInput | None:
        """Input whose rows are run as they come, for as long as the command runs; None for other inputs."""
        rows = queued_input(self.settings)
        return rows if rows is not None and rows.follow and self.options.retry is None else None

    @property
    def results(self) -> str:
        """Place of the results, for people."""
        return str(self.workload.bucket(self.settings) or self.directory)
