"""Plugins to break, and hosts that are always closed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rollout_worker import hosting
from rollout_worker.hosting.channel import Limits
from rollout_worker.hosting.host import PluginHost

HERE = Path(__file__).parent
SAMPLES = Path(hosting.__file__).parent / "samples"
LIMITS = Limits(
    max_request_bytes=1 << 20,
    max_reply_bytes=1 << 20,
    start_timeout_s=20.0,
    stop_grace_s=0.5,
    first_backoff_s=0.01,
    max_backoff_s=5.0,
)

PYTHON = """
name = "faulty-python"
version = "1"
kind = "{kind}"
mode = "python"
{top}
[runtime]
concurrency = {concurrency}
[entry.python]
module = "faulty"
"""
SIDECAR = """
name = "faulty-sidecar"
version = "1"
kind = "{kind}"
mode = "sidecar"
{top}
[entry.sidecar]
command = ["python", "faulty_sidecar.py"]
script = "faulty_sidecar.py"
"""
CDYLIB = """
name = "faulty-cdylib"
version = "1"
kind = "{kind}"
mode = "cdylib"
{top}
[entry.cdylib]
path = "libfaulty.so"
"""
MANIFESTS = {"python": PYTHON, "sidecar": SIDECAR, "cdylib": CDYLIB}


def compile_library(source: Path, target: Path, *options: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on PATH: install cc to test cdylib plugins")
    include = f"-I{SAMPLES / 'cdylib'}"
    subprocess.run([compiler, "-shared", "-fPIC", include, *options, "-o", target, source], check=True)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes a faulty plugin of a mode; gives its manifest."""

    def write(mode: str, *, kind: str = "other", top: str = "", concurrency: int = 1, cc: tuple[str, ...] = ()) -> Path:
        directory = tmp_path / mode
        directory.mkdir(exist_ok=True)
        for name in ("faulty.py", "faulty_sidecar.py"):
            shutil.copy(HERE / name, directory)
        if mode == "cdylib":
            compile_library(HERE / "faulty.c", directory / "libfaulty.so", *cc)
        manifest = directory / "rollout-plugin.toml"
        manifest.write_text(MANIFESTS[mode].format(kind=kind, top=top, concurrency=concurrency))
        return manifest

    return write


@pytest.fixture
async def host() -> AsyncIterator[PluginHost]:
    host = PluginHost(limits=LIMITS)
    yield host
    await host.close()


@pytest.fixture
async def reloading_host() -> AsyncIterator[PluginHost]:
    host = PluginHost(limits=LIMITS, hot_reload=True)
    yield host
    await host.close()


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """A copy of the samples, the library built."""
    shutil.copytree(SAMPLES, tmp_path / "samples")
    compile_library(tmp_path / "samples/cdylib/sample.c", tmp_path / "samples/cdylib/libsample.so", "-Wall", "-Werror")
    return tmp_path / "samples"
