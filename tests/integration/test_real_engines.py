"""The conformance suite over real container engines, and what only they can show: a lane of its own, `make test-podman`.

podman is started here, as root; a Docker engine is used where one answers (DOCKER_HOST, or its usual socket).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rollout_worker.sandboxes import conformance
from rollout_worker.sandboxes.conformance import CASES, Case, engine_bench
from rollout_worker.sandboxes.docker import open_docker
from rollout_worker.sandboxes.engine_api import EngineError
from rollout_worker.sandboxes.engine_provider import EngineProvider
from rollout_worker.sandboxes.errors import ImageBuildError, ImagePullError, SandboxCreateError, SandboxRefusedError
from rollout_worker.sandboxes.podman import open_podman
from rollout_worker.sandboxes.port import Image, Limits, Spec
from small_root import small_root

pytestmark = [pytest.mark.podman, pytest.mark.asyncio(loop_scope="module")]

OPEN = {"podman": open_podman, "docker": open_docker}


@pytest.fixture(scope="module", params=list(OPEN))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, settings)."""
    if request.param == "docker":
        yield "docker", {}
        return
    if shutil.which("podman") is None or os.geteuid() != 0:
        pytest.skip("podman is not installed, or this is not root")
    socket = tmp_path_factory.mktemp("podman") / "podman.sock"
    service = subprocess.Popen(["podman", "system", "service", "--time", "0", f"unix://{socket}"])
    try:
        until = time.monotonic() + 30
        while not socket.exists() and service.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        yield "podman", {"host": f"unix://{socket}"}
    finally:
        service.terminate()
        service.wait()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def settings(engine: tuple[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With an image, built by the engine."""
    name, config = engine
    context = tmp_path_factory.mktemp("context")
    (context / "root.tar").write_bytes(small_root())
    (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\nENV PATH=/bin\n")
    provider = OPEN[name](tmp_path_factory.mktemp("state"), config)
    try:
        async with provider:
            built = await provider.build_image(context, timeout_s=300, anew=False)
    except SandboxRefusedError as error:
        pytest.skip(error.message)
    return {**config, "default_image": built.reference}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(
    engine: tuple[str, dict[str, Any]], settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProvider]:
    async with OPEN[engine[0]](tmp_path_factory.mktemp("state"), settings) as one:
        await one.probe()
        yield one


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bench(provider: EngineProvider, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[conformance.Bench]:
    one = engine_bench(provider, tmp_path_factory.mktemp("scratch"), large=50 << 20)
    yield one
    await one.forget()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_conformance(case: Case, bench: conformance.Bench) -> None:
    try:
        await case.run(bench)
    except conformance.NotApplicableError as error:
        pytest.skip(str(error))


async def test_a_failing_build_is_told(provider: EngineProvider, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {settings['default_image']}\nRUN echo told; exit 7\n")
    with pytest.raises(ImageBuildError, match="told"):
        await provider.build_image(tmp_path, timeout_s=120, anew=False)


async def test_an_image_that_does_not_exist_is_told(provider: EngineProvider) -> None:
    with pytest.raises(ImagePullError, match="cannot be pulled"):
        await provider.pull_image("localhost:9/no/such:image", timeout_s=60, anew=False)


OWNER = """
import asyncio, json, sys
from pathlib import Path
from rollout_worker.sandboxes.port import Limits, Spec
from rollout_worker.sandboxes.providers import open_provider

async def main():
    async with open_provider(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])) as provider:
        sandbox = await provider.create(Spec(limits=Limits(0.5, 256)))
        print(sandbox.name, flush=True)
        await sandbox.exec("sleep 1000")

asyncio.run(main())
"""


async def test_a_killed_owners_container_is_removed_by_whoever_comes_next(
    engine: tuple[str, dict[str, Any]], settings: dict[str, Any], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", OWNER, engine[0], str(tmp_path), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        owner.send_signal(signal.SIGKILL)
    async with OPEN[engine[0]](tmp_path, settings) as one:
        with pytest.raises(EngineError) as raised:
            await one.engine.show(name)
        assert raised.value.status == 404


async def test_an_images_user_and_directory_are_kept(
    provider: EngineProvider, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = settings["default_image"]
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nRUN mkdir /work\nWORKDIR /work\nUSER nobody\nENV A=1\n")
    built = await provider.build_image(tmp_path, timeout_s=120, anew=False)
    assert (built.workdir, built.user, built.env["A"]) == ("/work", "nobody", "1")
    spec = Spec(root=Image(built.reference), limits=Limits(0.5, 256), workdir=built.workdir)
    async with await provider.create(spec) as sandbox:
        said = (await sandbox.exec("id -un; pwd; echo $A")).check().stdout.text()
    assert said == "nobody\n/work\n1\n"


async def test_an_images_entrypoint_runs_and_runs_again_after_a_kill(
    provider: EngineProvider, settings: dict[str, Any], tmp_path: Path
) -> None:
    script = '#!/bin/sh\nsleep 300 &\necho $! > /tmp/pid\n$FIRST\nexec "$@"\n'
    (tmp_path / "begin").write_text(script)
    (tmp_path / "begin").chmod(0o755)
    (tmp_path / "Dockerfile").write_text(
        f'FROM {settings["default_image"]}\nCOPY begin /begin\nENTRYPOINT ["/begin"]\n'
    )
    built = await provider.build_image(tmp_path, timeout_s=120, anew=False)
    spec = Spec(root=Image(built.reference), limits=Limits(0.5, 256))
    runs = "until [ -s /tmp/pid ]; do sleep 0.05; done; kill -0 $(cat /tmp/pid) && rm /tmp/pid"
    async with await provider.create(spec) as sandbox:
        (await sandbox.exec(runs, timeout_s=30)).check()
        await sandbox.kill()
        (await sandbox.exec(runs, timeout_s=30)).check()
    with pytest.raises(SandboxCreateError, match="ENTRYPOINT of its image ended with exit code 3"):
        await provider.create(replace(spec, env={"FIRST": "exit 3"}))
