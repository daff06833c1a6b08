"""Cases on the end of a sandbox, requested or not, and on refusals."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from rollout_worker.sandboxes.conformance.suite import (
    PATIENCE_S,
    Bench,
    NotConformingError,
    case,
    eventually,
    needs,
    raises,
    same,
    still_at,
    true,
)
from rollout_worker.sandboxes.errors import (
    SandboxFileError,
    SandboxGoneError,
    SandboxRefusedError,
)
from rollout_worker.sandboxes.port import (
    Image,
    Limits,
    Mount,
    Network,
)


@case
async def stopped_sandboxes_keep_theirfiles_of(bench: Bench) -> None:
    async with await bench.make() as sandbox:
        place = await bench.inside(sandbox)
        await sandbox.exec(f"while :; do echo x >> {place}/beats; sleep 0.02; done > /dev/null 2>&1 &")

        async def began() -> bool:
            with contextlib.suppress(SandboxFileError):
                return bool(await sandbox.read_file(f"{place}/beats"))
            return False

        await eventually(began, "the loop begins")
        await sandbox.stop()
        await still_at(sandbox, f"{place}/beats")
        async with raises(SandboxGoneError):
            await sandbox.exec("true")
        same((await sandbox.download(place, bench.directory())).files, 1, "files of the stopped sandbox")


@case
async def destroyed_sandboxes_are_gone(bench: Bench) -> None:
    sandbox = await bench.make()
    running = asyncio.ensure_future(sandbox.exec("sleep 1000"))
    await asyncio.sleep(0.05)
    # Hard to remove: no permissions, a deep tree, names that are not text.
    deep = "i=0; while [ $i -lt 60 ]; do d=$(printf '%0200d' 0); mkdir $d && cd $d; i=$((i+1)); done"
    await sandbox.exec(f"mkdir -p locked/inner; touch locked/inner/x \"$(printf 'x\\377')\"; chmod 0 locked; {deep}")
    directory = bench.host_directory(sandbox) if bench.host_directory else None
    await sandbox.destroy()
    await sandbox.destroy()
    async with raises(SandboxGoneError):
        await running
    async with raises(SandboxGoneError):
        await sandbox.exec("true")
    async with raises(SandboxGoneError):
        await sandbox.read_file("/etc/passwd")
    true(directory is None or not directory.exists(), f"{directory} is still there")
    true(sandbox.cost() >= 0, "its cost is not known")


@case
async def a_lost_sandbox_is_no_failed_command(bench: Bench) -> None:
    needs(bench.kill_from_outside, "the suite cannot break a sandbox of this provider")
    assert bench.kill_from_outside is not None
    sandbox = await bench.make()
    begun = asyncio.Event()
    running = asyncio.ensure_future(sandbox.exec("echo x; sleep 1000", on_output=lambda stream, data: begun.set()))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    bench.kill_from_outside(sandbox)
    async with raises(SandboxGoneError):
        await asyncio.wait_for(running, PATIENCE_S)
    async with raises(SandboxGoneError):
        await sandbox.exec("true")
    await sandbox.destroy()


@case
async def what_cannot_be_kept_is_refused(bench: Bench) -> None:
    found = await bench.capabilities()
    refused: list[dict[str, Any]] = [
        {"limits": Limits(cpus=1e6)},
        {"limits": Limits(memory_mb=1 << 40)},
        {"limits": Limits(pids=0)},
        {"directories": ("relative",)},
        {"directories": ("/a/../b",)},
        {"workdir": "relative"},
        {"mounts": (Mount(bench.scratch / "no-such-thing", "/x"),)},
    ]
    for mode in {"none", "public", "allowlist", "host"} - found.networks:
        refused.append({"network": Network(mode)})  # type: ignore[arg-type]
    if "allowlist" in found.networks:
        refused.append({"network": Network("allowlist", ("not a host",))})
    if "image" not in found.roots:
        refused.append({"root": Image("debian:12")})
    if not found.private_directories:
        refused.append({"directories": ("/app",)})
    refused += [{"require": frozenset({name})} for name, how in found.limits.items() if how != "kernel"]
    for changes in refused:
        try:
            async with raises(SandboxRefusedError):
                await (await bench.make(**changes)).destroy()
        except NotConformingError as error:
            raise NotConformingError(f"{changes} was not refused: {error}") from error


@case
async def every_reason_is_told(bench: Bench) -> None:
    try:
        await bench.make(limits=Limits(cpus=1e6, memory_mb=1 << 40), directories=("x",))
    except SandboxRefusedError as error:
        true(len(error.context["reasons"]) >= 3, f"only these: {error.context['reasons']}")
    else:
        raise NotConformingError("it was not refused")
