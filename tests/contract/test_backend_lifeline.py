"""An engine library's processes die with the engine child, however it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

_PARENT = """
import os, signal, time
from rollout_worker.backends.lifeline import hold
{hold}
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.write(write, b"x")  # the hooks have run
    signal.pause()
os.read(read, 1)
print(child, flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel can be asked for this")
@pytest.mark.parametrize("held", [True, False])
def test_a_forked_process_does_not_survive(held: bool) -> None:
    code = _PARENT.format(hold="hold()" if held else "")
    env = {key: value for key, value in os.environ.items() if key != "ROLLOUT_ENGINE_OWNER"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, alive = psutil.wait_procs([child], timeout=10 if held else 0.3)
    survived = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    if held:
        assert gone or not survived
    else:
        assert survived, "the test proves nothing: the child dies by itself"
        os.kill(child.pid, signal.SIGKILL)
