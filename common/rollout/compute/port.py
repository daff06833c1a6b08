"""What a host offers, and the notice that it is about to be taken away."""

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
        """Its name for CUDA_VISIBLE_DEVICES."""
        return self.uuid or str(self.index)


@dataclass(frozen=True, slots=True)
class Host:
    cpus: int
    memory_mib: int
    gpus: tuple[Gpu, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()  # where and what it is, in a cloud


@dataclass(frozen=True, slots=True)
class Preemption:
    """`lead_s`: seconds the provider promises, or that are left of them; `budget_s`: what a drain should aim for (AWS
    120/60, GCP 30/15)."""

    reason: str
    lead_s: float
    budget_s: float


class Compute(Protocol):
    async def inventory(self) -> Host: ...

    async def preemption(self) -> Preemption:
        """Returns when notice comes; waits for ever otherwise. Cancel it to stop watching."""
        ...

    async def close(self) -> None: ...
