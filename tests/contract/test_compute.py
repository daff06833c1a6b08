"""Inventory and the preemption notice of this host."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path

import pytest
from rollout.compute import cgroup
from rollout.compute.local import LocalCompute, nvidia_gpus, visible
from rollout.compute.opening import open_compute
from rollout.compute.port import Gpu
from rollout.config.settings import ComputeSection
from rollout.model.errors import ConfigError


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HOST = {
    "proc/cpuinfo": "".join(f"processor\t: {i}\nmodel name\t: x\n\n" for i in range(8)),
    "proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
}
GIB = 1 << 30


async def look(root: Path) -> tuple[int, int]:
    host = await LocalCompute(root=root, platform="linux", gpus=lambda: ()).inventory()
    return host.cpus, host.memory_mib


async def test_proc(tmp_path: Path) -> None:
    assert await look(tree(tmp_path, HOST)) == (8, 16384)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, (2, 16384)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, (8, 16384)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}, (8, 4096)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, (8, 16384)),
        (  # a parent's limit binds too
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "50000 100000",
                "sys/fs/cgroup/pod/memory.max": str(2 * GIB),
                "sys/fs/cgroup/pod/box/memory.max": str(3 * GIB),
            },
            (1, 2048),
        ),
        (  # version 1
            {
                "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            (3, 1024),
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            (8, 16384),
        ),
    ],
)
async def test_cgroup_limits(tmp_path: Path, files: dict[str, str], expected: tuple[int, int]) -> None:
    assert await look(tree(tmp_path, {**HOST, **files})) == expected


async def test_this_host() -> None:
    host = await open_compute(ComputeSection()).inventory()
    assert host.cpus >= 1
    assert host.memory_mib > 100


async def test_elsewhere_psutil_answers(tmp_path: Path) -> None:
    host = await LocalCompute(root=tmp_path, platform="darwin", gpus=lambda: (Gpu(0, "x", 1),)).inventory()
    assert host.cpus >= 1
    assert host.memory_mib > 100
    assert host.gpus == ()


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "oom 3\noom_kill 2\n"}, 2),
        (
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 7\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/a\n"}, 0),
    ],
)
def test_what_the_kernel_killed_for_want_of_memory_is_counted(
    tmp_path: Path, files: dict[str, str], kills: int
) -> None:
    assert cgroup.oom_kills(tree(tmp_path, files)) == kills


class Nvml(types.ModuleType):
    """A driver, or a broken one."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: str = "") -> None:
        super().__init__("pynvml")
        self.broken = broken

    def _maybe(self, name: str) -> None:
        if self.broken == name:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._maybe("init")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._maybe("handle")
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:
        return b"NVIDIA Old" if handle else "NVIDIA New"

    def nvmlDeviceGetUUID(self, handle: int) -> bytes | str:
        return b"GPU-1a" if handle else "GPU-0a"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=80 * GIB)


def test_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert nvidia_gpus() == (Gpu(0, "NVIDIA New", 81920, "GPU-0a"), Gpu(1, "NVIDIA Old", 81920, "GPU-1a"))
    for broken in ("init", "handle"):
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken))
        assert nvidia_gpus() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert nvidia_gpus() == ()


def test_nvidia_smi_where_there_is_no_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 81559, GPU-0a'\n")
    program.chmod(0o755)
    assert nvidia_gpus() == (Gpu(0, "NVIDIA H100 80GB HBM3", 81559, "GPU-0a"),)
    program.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert nvidia_gpus() == ()


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, ["GPU-0a", "GPU-1a", "GPU-1b"]),
        ("", []),
        ("2,0", ["GPU-1b", "GPU-0a"]),
        ("GPU-1b, GPU-0", ["GPU-1b", "GPU-0a"]),
        ("0,9,1", ["GPU-0a"]),  # CUDA reads no further
        ("GPU-1", []),  # names two
        ("MIG-7,1", ["MIG-7", "GPU-1a"]),
    ],
)
def test_an_inherited_list_of_devices_is_kept_to(listed: str | None, expected: list[str]) -> None:
    gpus = tuple(Gpu(n, "x", 1, uuid) for n, uuid in enumerate(["GPU-0a", "GPU-1a", "GPU-1b"]))
    assert [g.device for g in visible(gpus, listed)] == expected


async def test_notice_by_hand() -> None:
    compute = LocalCompute()
    waiting = asyncio.create_task(compute.preemption())
    await asyncio.sleep(0)
    assert not waiting.done()
    compute.preempt("spot", 30, 15)
    notice = await waiting
    assert (notice.reason, notice.lead_s, notice.budget_s) == ("spot", 30, 15)
    assert await compute.preemption() == notice


async def test_notice_by_file(tmp_path: Path) -> None:
    file = tmp_path / "preempt"
    compute = open_compute(ComputeSection(preemption_file=str(file)))
    waiting = asyncio.create_task(compute.preemption())
    file.write_text("maintenance at noon\nmore")
    assert (await asyncio.wait_for(waiting, 60)).reason == "maintenance at noon"
    file.write_text("")
    assert "appeared" in (await open_compute(ComputeSection(preemption_file=str(file))).preemption()).reason


async def test_watching_can_be_stopped() -> None:
    compute = LocalCompute()
    waiting = asyncio.create_task(compute.preemption())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await compute.close()


def test_opening_by_name() -> None:
    with pytest.raises(ConfigError, match="known: ec2, gce, local"):
        open_compute(ComputeSection(backend="azure"))


@pytest.mark.parametrize(
    ("files", "used"),
    [
        ({}, None),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(GIB),
            },
            GIB,
        ),
    ],
)
def test_memory_in_use_of_a_container(tmp_path: Path, files: dict[str, str], used: int | None) -> None:
    assert cgroup.memory_used(tree(tmp_path, files)) == used
