"""A host's resources, and the notice that it is about to be taken away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    memory_mib: int
    uuid: str = ""

    @property
    def device(self) -> str:
        """Its name in CUDA_VISIBLE_DEVICES."""
        return self.uuid or str(self.index)


@dataclass(frozen=True, slots=True)
class Host:
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()  # where and what it is, in a cloud


@dataclass(frozen=True, slots=True)
class Preemption:
    """A notice. `lead_s` are the seconds that the provider promises or that are left. `budget_s` is the target duration
    of a drain (AWS 120/60, GCP 30/15)."""

    reason: str
    lead_s: float
    budget_s: float


class Compute(Protocol):
    async def inventory(self) -> Host: ...

    async def preemption(self) -> Preemption:
        """Wait for a notice and return it. Cancel it to stop watching."""
        ...

    async def close(self) -> None: ...
