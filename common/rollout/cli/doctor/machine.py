"""Checks of this machine: versions, packages, limits, disks, accelerators."""

from __future__ import annotations

import asyncio
import importlib.metadata as metadata
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rollout.cli.descriptors import open_files_limit
from rollout.cli.doctor.finding import Finding, fault, ok, unless, warning
from rollout.cli.version import DISTRIBUTION
from rollout.processes.command import run_async

OPEN_FILES_FEW = 1024
DISK_LOW = 1 << 30
DISK_NONE = 64 << 20
_GIB = 1 << 30
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(;.*)?$")
_BOUND = re.compile(r"(>=|<)\s*([0-9][0-9.]*)")


async def versions() -> list[Finding]:
    """Check the versions of this program, of Python, and of the packages it needs."""
    return await asyncio.to_thread(_versions)


def _versions() -> list[Finding]:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return [warning("version", "rollout runs from a checkout that is not installed", "pip install -e .")]
    found = [ok("version", f"rollout {distribution.version}, {platform.system()} {platform.machine()}")]
    found.append(_python(str(distribution.metadata["Requires-Python"] or "")))
    found.append(_packages(distribution.requires or ()))
    return found


def _python(wanted: str) -> Finding:
    running = platform.python_version()
    if unmet(running, wanted):
        return fault("python", f"Python {running}, which is not supported ({wanted})", "use a supported Python")
    return ok("python", f"Python {running} ({sys.executable})")


def _packages(requires: Iterable[str]) -> Finding:
    wrong: list[str] = []
    named: list[str] = []
    count = 0
    for line in requires:
        match = _REQUIREMENT.match(line)
        if match is None or "extra ==" in (match[3] or "") or "sys_platform" in (match[3] or ""):
            continue
        count += 1
        name, wanted = match[1], match[2]
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed")
            continue
        if unmet(installed, wanted):
            wrong.append(f"{name} {installed} is installed, {wanted.strip()} is needed")
        if name in ("grpcio", "protobuf", "pydantic"):
            named.append(f"{name} {installed}")
    if wrong:
        return fault("packages", "; ".join(wrong), f"pip install --upgrade {DISTRIBUTION}")
    return ok("packages", f"{count} packages as needed ({', '.join(named)})")


def unmet(installed: str, wanted: str) -> bool:
    """Return whether `installed` violates a `>=` or `<` in `wanted`; only release numbers are compared."""
    have = _numbers(installed)
    for sign, bound in _BOUND.findall(wanted):
        limit = _numbers(bound)
        width = max(len(have), len(limit))
        left, right = (value + (0,) * (width - len(value)) for value in (have, limit))
        if (sign == ">=" and left < right) or (sign == "<" and left >= right):
            return True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


async def open_files() -> list[Finding]:
    """Check how many files this process may open after the soft limit was raised."""
    limit = open_files_limit()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    text = f"{limit} files and connections a process (hard limit {shown})"
    remedy = "raise the hard limit: `ulimit -Hn`, LimitNOFILE= of systemd, or --ulimit nofile of a container"
    return [unless(limit >= OPEN_FILES_FEW, "open files", text, remedy)]


async def disks(places: dict[str, Path]) -> list[Finding]:
    """Check free space and write access of the directories in use. `places` maps a purpose to its directory."""
    return await asyncio.to_thread(lambda: [_disk(what, path) for what, path in places.items()])


def _disk(what: str, path: Path) -> Finding:
    name = f"disk ({what})"
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        space = shutil.disk_usage(there)
        if there.is_dir():
            with tempfile.TemporaryFile(dir=there) as probe:
                probe.write(b"x")
    except OSError as error:
        return fault(name, f"{path}: {error.strerror or error}", "check owner, mode and mount of that directory")
    return space_of(name, str(path), space.free, space.total)


def space_of(name: str, path: str, free: int, total: int) -> Finding:
    text = f"{path}: {free / _GIB:,.1f} of {total / _GIB:,.1f} GiB free"
    if free < DISK_NONE:
        return fault(name, text, "free some space: writes there are about to fail")
    if free < DISK_LOW or free < total // 50:
        return warning(name, text, "free some space")
    return ok(name, text)


async def accelerators() -> list[Finding]:
    """Check GPUs and their driver. Having none is no fault; one that does not answer is."""
    program = shutil.which("nvidia-smi")
    devices = await asyncio.to_thread(lambda: list(Path("/dev").glob("nvidia[0-9]*")))
    if program is None:
        if devices:
            return [
                warning(
                    "gpu",
                    f"{len(devices)} NVIDIA devices, and no nvidia-smi to ask",
                    "install the driver's tools; in a container, run it with the NVIDIA runtime",
                )
            ]
        return [ok("gpu", "none (not needed for the mock backend, map, or engines on the CPU)")]
    done = await run_async(
        [program, "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
    if done.code or not rows:
        words = (done.stderr or done.stdout).strip().splitlines()
        return [
            fault(
                "gpu",
                f"nvidia-smi fails: {words[0][:200] if words else f'exit code {done.code}'}",
                "the driver is not loaded, or another version than its library: reboot, or install it again",
            )
        ]
    found: list[Finding] = []
    for name, total, used, driver in rows:
        found.append(ok("gpu", f"{name}, {total} MiB ({used} MiB in use), driver {driver}"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found.append(ok("gpu", f"CUDA_VISIBLE_DEVICES={visible!r} limits what programs started here see"))
    return found
