"""This host: /proc and cgroups on Linux, psutil elsewhere, NVML or nvidia-smi if available; notice by a file."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rollout.compute import cgroup
from rollout.compute.port import Gpu, Host, Preemption
from rollout.config.cloud import CloudSection
from rollout.config.settings import ComputeSection
from rollout.processes.command import run

LEAD_S, BUDGET_S = 120.0, 60.0
_LOOK_EVERY_S = 0.5


def open_compute(section: ComputeSection, cloud: CloudSection) -> LocalCompute:
    return LocalCompute(Path(section.preemption_file) if section.preemption_file else None)


class LocalCompute:
    """The local backend. `preempt()` gives notice by hand, like the file when it appears; its first line is the
    reason."""

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
        gpus = self._gpus() if self._platform != "darwin" else ()
        return Host(count, memory >> 20, visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))

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
        """Do nothing: there is nothing to release."""


def _first_line(path: Path) -> str | None:
    """Return the first line, "" if the file is unreadable, since its presence is the notice, or None if it is
    missing."""
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


def visible(gpus: tuple[Gpu, ...], listed: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that `listed`, a value of CUDA_VISIBLE_DEVICES, leaves visible; None means all.

    Entries are indexes or UUIDs, which may be shortened; like CUDA, it ignores what follows an unknown entry. A named
    slice of a GPU (MIG) counts as a device of its own.
    """
    if listed is None:
        return gpus
    found: list[Gpu] = []
    for entry in filter(None, map(str.strip, listed.split(","))):
        if entry.startswith("MIG-"):
            found.append(Gpu(-1, "MIG", 0, entry))
            continue
        named = [
            g for g in gpus if (entry.isdigit() and g.index == int(entry)) or (g.uuid and g.uuid.startswith(entry))
        ]
        if len(named) != 1 or named[0] in found:
            break
        found.append(named[0])
    return tuple(found)


def nvidia_gpus() -> tuple[Gpu, ...]:
    """Return GPUs in order of the PCI bus, by NVML if `nvidia-ml-py` is installed, else by nvidia-smi. Never raises."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _nvidia_smi()
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
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return Gpu(index, _text(name), int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20, _text(uuid))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # bytes in older versions


def _nvidia_smi() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        done = run(command, timeout_s=30)
        if done.code:
            return ()
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        return tuple(Gpu(int(index), name, int(memory), uuid) for index, name, memory, uuid in rows)
    except (OSError, ValueError):
        return ()
