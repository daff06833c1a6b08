"""Makes processes that an engine library starts die with the engine child; otherwise they keep the GPU's memory.

vLLM runs its core in a process of its own. If the engine child is killed, that process is adopted by init and lives on.
On Linux the kernel can kill it instead: `hold()` makes every forked child ask for that, and `plugin`, registered under
`vllm.general_plugins`, does so in children that vLLM spawns.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from rollout.processes.lifeline import ask_kernel

_OWNER = "ROLLOUT_ENGINE_OWNER"


def hold() -> None:
    """Call this once in the engine child, before the engine starts processes. It has an effect on Linux only."""
    if sys.platform != "linux" or os.environ.get(_OWNER) == str(os.getpid()):
        return
    os.environ[_OWNER] = str(os.getpid())
    os.register_at_fork(after_in_child=plugin)


def die() -> NoReturn:
    """End the engine child as a crash would, because its engine is beyond repair."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(70)


def plugin() -> None:
    """Make this process die with the one that started it, if it descends from a process that called hold()."""
    owner = os.environ.get(_OWNER)
    if sys.platform != "linux" or owner is None or owner == str(os.getpid()):
        return
    ask_kernel()
    if os.getppid() == 1 and owner != "1":
        os._exit(1)  # it died before the kernel was asked
