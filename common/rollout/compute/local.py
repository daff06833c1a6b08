"""This host: /proc and cgroups on Linux, psutil elsewhere, NVML where it works; notice by a file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rollout.compute import cgroup
from rollout.compute.port import Gpu, Host, Preemption
from rollout.config.settings import ComputeSection

LEAD_S, BUDGET_S = 120.0, 60.0
_LOOK_EVERY_S = 0.5


def open_compute(section: ComputeSection) -> LocalCompute:
    return LocalCompute(Path(section.preemption_file) if section.preemption_file else None)


class LocalCompute:
    """`preempt()` gives notice by hand, as the file's appearance does; its first line, if any, is the reason."""

    def __init__(
        self,
        preemption_file: Path | None = None,
        *,
        root: Path = Path("/"),
        platform: str = sys.platform,
        gpus: Callable[[], tuple[Gpu, ...]] | None = None,
    ) -> None:
        self._file = preemption_file
        self._root = root
        self._platform = platform
        self._gpus = gpus or nvidia_gpus
        self._notice: asyncio.Future[Preemption] | None = None
        self._given: Preemption | None = None

    async def inventory(self) -> Host:
        return await asyncio.to_thread(self._inventory)

    def _inventory(self) -> Host:
        count = _processors(self._root) if self._platform == "linux" else (psutil.cpu_count() or 1)
        memory = _memory_total(self._root) if self._platform == "linux" else 0
        memory = memory or int(psutil.virtual_memory().total)
        if self._platform == "linux":
            limit = cgroup.memory_limit(self._root)
            memory = memory if limit is None else min(memory, limit)
            count = cgroup.whole_cpus(cgroup.cpu_limit(self._root), count)
        return Host(count, memory >> 20, self._gpus() if self._platform != "darwin" else ())

    def preempt(self, reason: str = "requested", lead_s: float = LEAD_S, budget_s: float = BUDGET_S) -> None:
        self._given = Preemption(reason, lead_s, budget_s)
        if self._notice is not None and not self._notice.done():
            self._notice.set_result(self._given)

    async def preemption(self) -> Preemption:
        while self._given is None:
            if self._file is not None:
                reason = await asyncio.to_thread(_first_line, self._file)
                if reason is not None:
                    self.preempt(reason or f"{self._file} appeared")
                    break
            if self._notice is None or self._notice.done():
                self._notice = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._notice], timeout=_LOOK_EVERY_S if self._file is not None else None)
        assert self._given is not None
        return self._given

    async def close(self) -> None:
        """Nothing to give back."""


def _first_line(path: Path) -> str | None:
    """None: the file is not there. Empty where it cannot be read: that it is there is the notice."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].strip()
    except FileNotFoundError:
        return None
    except OSError:
        return ""


def _processors(root: Path) -> int:
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    count = sum(line.startswith("processor") for line in text.splitlines()) or psutil.cpu_count() or 1
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        count = min(count, len(os.sched_getaffinity(0)))  # taskset, a cpuset
    return count


def _memory_total(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        total = next(line for line in lines if line.startswith("MemTotal:"))
        return int(total.split()[1]) << 10
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def nvidia_gpus() -> tuple[Gpu, ...]:
    """Through NVML where `nvidia-ml-py` and a driver are there, else none: never an error."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ()
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)  # bytes in older versions
    text = name.decode() if isinstance(name, bytes) else str(name)
    return Gpu(index, text, int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20)
