"""Keeps sandboxes for inspection: their own content, as a directory of their host."""

from __future__ import annotations

import socket
from pathlib import Path

from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError
from rollout_worker.sandboxes.port import MIB, Sandbox

BYTES_MAX = 4096 * MIB


async def preserve(sandbox: Sandbox, workdir: str, state: Path) -> tuple[str, list[str]]:
    """End everything in the sandbox, and return (host:directory, remarks). Only users remove the directory."""
    target = state / "preserved" / sandbox.name
    remarks = list[str]()
    room = BYTES_MAX
    try:
        await sandbox.stop()
        wanted = [*sandbox.spec.directories, sandbox.home]
        if workdir != "/":
            wanted.append(workdir)
        for path in dict.fromkeys(wanted):
            if any(path.startswith(f"{other}/") for other in sandbox.spec.directories):
                continue  # it is in that one
            place = target / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                room -= (await sandbox.download(path, place, max_bytes=room)).size
            except SandboxFileError as error:
                if error.context.get("reason") != "ENOENT":
                    remarks.append(f"{path} was not preserved whole: {error.message}")
    except (SandboxError, OSError) as error:
        remarks.append(f"the sandbox was not preserved whole: {error}")
    return f"{socket.gethostname()}:{target}", remarks
