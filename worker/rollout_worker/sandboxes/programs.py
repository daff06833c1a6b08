"""Helper processes of the worker that use only the standard library."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import rollout_worker

_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from rollout_worker.sandboxes.{} import {} as run; run()"


async def start_program(module: str, function: str, fd: int, *arguments: str) -> asyncio.subprocess.Process:
    """Call a function of a module here in a process of its own, with the descriptor as its first argument.

    Starts Python without site, so that the process and each of its forks is small.
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _PROGRAM.format(module, function)),
        *(str(Path(rollout_worker.__file__).parents[1]), str(fd), *arguments),
        pass_fds=[fd],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.defpath},  # its forks inherit its environment
        cwd="/",
        start_new_session=True,
    )
