"""Mode `sidecar`: any program that serves a Unix socket, which only this user can reach.

`ROLLOUT_PLUGIN_SOCKET` has the socket's path; the program binds it and accepts one connection.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import psutil
from rollout.plugins.manifest import Manifest
from rollout.processes import lifeline

from rollout_worker.hosting.channel import Channel, GrpcChannel, JsonChannel, Limits, fault
from rollout_worker.hosting.process import PluginProcess
from rollout_worker.hosting.running import Running

SOCKET = "ROLLOUT_PLUGIN_SOCKET"
_LOOK_EVERY_S = 0.02
_TMP = Path("/tmp")
_PREFIX = "rollout-plugin-"


async def start(manifest: Manifest, limits: Limits) -> Running:
    """Start the process and connect; it is not yet initialised. Raises PluginError with reason "start"."""
    entry = manifest.entry.sidecar
    assert entry is not None
    program = sys.executable if entry.command[0] == "python" else entry.command[0]
    # Under /tmp, not $TMPDIR: a Unix socket's path has at most 103 bytes on macOS. mkdtemp makes it 0700.
    await asyncio.to_thread(sweep)
    scratch = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_TMP))
    path = scratch / "s"
    process: PluginProcess | None = None
    try:
        process = await PluginProcess.start(
            manifest.name,
            [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid()), program, *entry.command[1:]],
            cwd=manifest.directory,
            environment={SOCKET: str(path)},
        )
        channel = await _connect(process, path, entry.protocol, limits)
    except BaseException:
        if process is not None:
            await process.stop(0.0)
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    init = {"name": manifest.name, "version": manifest.version, "protocol": 1, "config": manifest.config}
    return Running(process, channel, init, scratch)


def sweep() -> None:
    """Remove what killed workers of this user left."""
    for left in _TMP.glob(f"{_PREFIX}*-*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            if pid.isdigit() and left.stat().st_uid == os.getuid() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:
            continue  # another worker was faster


async def _connect(process: PluginProcess, path: Path, protocol: str, limits: Limits) -> Channel:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.start_timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, str(path))
            break
        except (FileNotFoundError, ConnectionRefusedError):  # not bound, or not listening yet
            connection.close()
        except BaseException:
            connection.close()
            raise
        if process.ended:
            raise fault("start", f"the sidecar {await process.describe_end()}")
        if loop.time() > deadline:
            raise fault("start", f"the sidecar did not listen on ${SOCKET} within {limits.start_timeout_s:g} s")
        await asyncio.sleep(_LOOK_EVERY_S)
    await asyncio.to_thread(path.chmod, 0o600)
    if protocol == "json":
        return await JsonChannel.over(connection, limits)
    connection.close()
    return GrpcChannel(f"unix:{path}", limits)
