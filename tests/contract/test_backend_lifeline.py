"""An engine library's processes die with the engine child, however it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
    gone, alive = psutil.wait_procs([child], timeout=60 if held else 0.3)
    survived = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    if held:
        assert gone or not survived
    else:
        assert survived, "the test proves nothing: the child dies by itself"
        os.kill(child.pid, signal.SIGKILL)


_ENGINE = """
import asyncio, os, sys
from rollout_worker.backends.environment import engine_environment
from rollout_worker.backends.port import BackendOptions

async def main():
    from rollout_worker.backends.vllm import open_backend
    await open_backend(BackendOptions(sys.argv[1], kind="vllm", options=OPTIONS)).start()
    print("started", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    os.environ.update(engine_environment({"kind": "vllm", **OPTIONS}, local_model=True))
    asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_vllms_core_does_not_survive(tmp_path: Path) -> None:
    from rollout_worker.backends.tiny import make_tiny

    make_tiny(tmp_path / "tiny")
    script = tmp_path / "engine.py"
    script.write_text(_ENGINE)
    command = [sys.executable, str(script), str(tmp_path / "tiny")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        while parent.stdout.readline() not in ("started\n", ""):
            pass
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    assert any(children), "vLLM has no process of its own any more: this test, and lifeline.py, are not needed"
    _, alive = psutil.wait_procs(children, timeout=60)
    survived = [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    for child in survived:
        child.kill()
    assert survived == []
