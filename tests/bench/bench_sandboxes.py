"""What a sandbox costs to make, to run a command in and to remove, by provider; beside it bubblewrap alone.

All sides run in turns, so that each meets the same machine. Nothing is asserted.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

from measure import Row, directory, spread
from rollout_worker.sandboxes.conformance import PROVIDERS
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.port import Limits, Network, Provider, Spec

ROUNDS = 50
BARE = "bwrap --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 "
BARE += "--proc /proc --dev /dev --unshare-all /bin/true"


async def once(provider: Provider, spec: Spec, times: dict[str, list[float]]) -> None:
    marks = [time.perf_counter()]
    sandbox = await provider.create(spec)
    marks.append(time.perf_counter())
    (await sandbox.exec(["/bin/true"])).check()
    marks.append(time.perf_counter())
    await sandbox.destroy()
    marks.append(time.perf_counter())
    for name, begun, ended in zip(("start", "command", "destroy"), marks, marks[1:], strict=False):
        times[name].append(1000 * (ended - begun))


async def measure(root: Path, rounds: int) -> list[Row]:
    opened: dict[str, tuple[Provider, Spec, dict[str, list[float]]]] = {}
    notes: list[Row] = []
    bare: list[float] = []
    try:
        for name, factory in PROVIDERS.items():
            provider = factory(root / name)
            await provider.open()
            try:
                found = await provider.probe()
            except SandboxRefusedError as error:
                await provider.close()
                notes.append(Row(f"`{name}`", f"not here: {error}"))
                continue
            network = Network("none" if "none" in found.networks else "host")
            spec = Spec(network=network, limits=Limits(cpus=1.0, memory_mb=512))
            opened[name] = (provider, spec, {"start": [], "command": [], "destroy": []})
        for _ in range(rounds):
            if shutil.which("bwrap"):
                begun = time.perf_counter()
                subprocess.run(BARE.split(), check=True)
                bare.append(1000 * (time.perf_counter() - begun))
            for provider, spec, times in opened.values():
                await once(provider, spec, times)
    finally:
        for provider, _, _ in opened.values():
            await provider.close()
    rows = [
        Row(
            f"`{name}`",
            ", ".join(f"{what} {spread(values, 1)}" for what, values in times.items()) + f" ms, {rounds} times",
            values={what: sorted(values)[len(values) // 2] for what, values in times.items()},
        )
        for name, (_, _, times) in opened.items()
    ]
    if bare:
        rows.append(Row("bubblewrap alone, start to end", f"{spread(bare, 1)} ms"))
    return rows + notes


def rows(quick: bool) -> list[Row]:
    with directory() as root:
        return asyncio.run(measure(root, 5 if quick else ROUNDS))
