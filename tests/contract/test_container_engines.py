"""Sandboxes of container engines, over an engine in this process that does as it is told; real ones have a lane."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from container_engine import ContainerEngine, container_engine
from rollout.model.errors import ConfigError
from rollout_worker.sandboxes.claims import Journal
from rollout_worker.sandboxes.docker import DockerProvider, open_docker
from rollout_worker.sandboxes.engine_sandbox import EngineSandbox
from rollout_worker.sandboxes.errors import (
    ImageBuildError,
    ImageBuildTimeoutError,
    ImageError,
    ImageNotFoundError,
    SandboxCreateError,
    SandboxFileError,
    SandboxGoneError,
    SandboxNoRoomError,
    SandboxRefusedError,
    SandboxTeardownError,
)
from rollout_worker.sandboxes.images.prepare import Preparation
from rollout_worker.sandboxes.images.store import Store
from rollout_worker.sandboxes.podman import open_podman
from rollout_worker.sandboxes.port import Image, Limits, Network, RootFs, Spec
from rollout_worker.sandboxes.trees import Selection

SPEC = Spec(root=Image("small:1"), limits=Limits(0.5, 256), workdir="/tmp")


@pytest.fixture
async def engine() -> AsyncIterator[ContainerEngine]:
    with tempfile.TemporaryDirectory(prefix="engine-") as directory:  # a socket's path may not be long
        async with container_engine(Path(directory)) as one:
            one.images["small:1"] = {"Env": ["A=1"], "WorkingDir": "/tmp", "User": ""}
            yield one


def provider_at(engine: ContainerEngine, state: Path, **config: Any) -> DockerProvider:
    return open_docker(state, {"host": engine.url, **config})


@pytest.fixture
async def provider(engine: ContainerEngine, tmp_path: Path) -> AsyncIterator[DockerProvider]:
    async with provider_at(engine, tmp_path) as one:
        yield one


@pytest.fixture
async def sandbox(provider: DockerProvider) -> AsyncIterator[EngineSandbox]:
    async with await provider.create(SPEC) as one:
        yield one


# Commands


@pytest.mark.parametrize("frame", [1, 1 << 16])
async def test_what_a_command_prints_and_how_it_ends(
    sandbox: EngineSandbox, engine: ContainerEngine, frame: int
) -> None:
    engine.frame = frame
    finished = await sandbox.exec("echo out; echo err >&2; exit 3", env={"B": "2"})
    assert (finished.how, finished.exit_code) == ("exited", 3)
    assert (finished.stdout.text(), finished.stderr.text()) == ("out\n", "err\n")
    assert (await sandbox.exec("kill -SEGV $$")).signal == 11
    assert (await sandbox.exec(["cat"], stdin=b"x" * 2_000)).stdout.size == 2_000
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127


async def test_a_command_that_cannot_begin_is_no_lost_sandbox(sandbox: EngineSandbox) -> None:
    finished = await sandbox.exec("true", user="no-such-user")
    assert (finished.exit_code, finished.stderr.text()) == (126, "unable to find user no-such-user\n")


async def test_a_container_too_full_for_a_command_is_emptied_first(
    sandbox: EngineSandbox, engine: ContainerEngine
) -> None:
    engine.cannot_start = 1
    finished = await sandbox.exec("true")
    assert (finished.exit_code, finished.stderr.text()) == (126, "runtime: no more processes\n")
    assert engine.containers[sandbox.name].starts == 1
    engine.cannot_start, engine.pids = 1, SPEC.limits.pids
    assert (await sandbox.exec("echo hello", stdin=b"x")).stdout.text() == "hello\n"
    assert engine.containers[sandbox.name].starts == 2


async def test_a_deadline_restarts_the_container_and_keeps_what_was_printed(
    sandbox: EngineSandbox, engine: ContainerEngine
) -> None:
    finished = await sandbox.exec("echo before; sleep 1000", timeout_s=0.3)
    assert (finished.how, finished.stdout.text()) == ("timed_out", "before\n")
    assert engine.containers[sandbox.name].starts == 2
    assert (await sandbox.exec("echo after")).stdout.text() == "after\n"


async def test_a_process_left_behind_does_not_hold_its_command(sandbox: EngineSandbox) -> None:
    finished = await asyncio.wait_for(sandbox.exec("sleep 1000 & echo started"), 20)
    assert (finished.how, finished.stdout.text()) == ("exited", "started\n")


@pytest.mark.parametrize("removed", [False, True])
async def test_a_container_that_ended_is_gone_and_no_failed_command(
    sandbox: EngineSandbox, engine: ContainerEngine, removed: bool
) -> None:
    begun = asyncio.Event()
    running = asyncio.ensure_future(sandbox.exec("echo x; sleep 1000", on_output=lambda *_: begun.set()))
    await begun.wait()
    engine.containers[sandbox.name].end()
    if removed:
        del engine.containers[sandbox.name]
    with pytest.raises(SandboxGoneError):
        await running
    with pytest.raises(SandboxGoneError):
        await sandbox.exec("true")


async def test_what_is_destroyed_meanwhile_is_gone(sandbox: EngineSandbox) -> None:
    begun = asyncio.Event()
    running = asyncio.ensure_future(sandbox.exec("echo x; sleep 1000", on_output=lambda *_: begun.set()))
    await begun.wait()
    await sandbox.destroy()
    with pytest.raises(SandboxGoneError):
        await running


# Files


async def test_files_go_there_and_back(sandbox: EngineSandbox, tmp_path: Path) -> None:
    await sandbox.write_file("/a/b/c", b"data", mode=0o750)
    assert await sandbox.read_file("/a/b/c") == b"data"
    (tmp_path / "up/in").mkdir(parents=True)
    (tmp_path / "up/in/file").write_bytes(b"x")
    assert (await sandbox.upload(tmp_path / "up", "/a")).files == 1
    await sandbox.stop()
    moved = await sandbox.download("/a", tmp_path / "down")
    assert (moved.files, (tmp_path / "down/in/file").read_bytes()) == (2, b"x")
    assert (tmp_path / "down/b/c").stat().st_mode & 0o777 == 0o750


async def test_a_selection_keeps_the_rest_in_the_container(sandbox: EngineSandbox, tmp_path: Path) -> None:
    for name in ("node_modules/a", "src/kept", "src/large", "src/linked/far"):
        await sandbox.write_file(f"/a/{name}", b"x" * (200 if name == "src/large" else 1))
    selection = Selection(("node_modules",), file_bytes=100, max_bytes=1000, max_entries=100)
    moved = await sandbox.download("/a", tmp_path / "down", selection=selection)
    found = {str(path.relative_to(tmp_path / "down")) for path in (tmp_path / "down").rglob("*") if path.is_file()}
    assert found == {"src/kept", "src/linked/far"}
    assert sorted(moved.skipped) == [("node_modules", "ignored"), ("src/large", "file_too_large")]
    assert moved.left_out == 2


async def test_faults_with_files_have_their_reasons(sandbox: EngineSandbox) -> None:
    await sandbox.write_file("/a/file", b"12345")
    for path, most, reason in (("/a", 9, "EISDIR"), ("/a/no", 9, "ENOENT"), ("/a/file", 4, "too_large")):
        with pytest.raises(SandboxFileError) as raised:
            await sandbox.read_file(path, max_bytes=most)
        assert raised.value.context["reason"] == reason
    with pytest.raises(SandboxFileError) as raised:
        await sandbox.write_file("/a/file/in", b"x")
    assert raised.value.context["reason"] == "ENOTDIR"


# Their life


async def test_a_container_is_as_it_was_declared(
    provider: DockerProvider, engine: ContainerEngine, tmp_path: Path
) -> None:
    spec = Spec(root=Image("small:1"), limits=Limits(0.5, 256, 512, 40), network=Network("none"), env={"X": "y"})
    async with await provider.create(spec) as one:
        config = engine.containers[one.name].config
    host = config["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["MemorySwap"]) == (500_000_000, 256 << 20, 256 << 20)
    assert (host["NetworkMode"], host["PidsLimit"] >= 40) == ("none", True)
    assert {"Name": "fsize", "Soft": 512 << 20, "Hard": 512 << 20} in host["Ulimits"]
    assert "X=y" in config["Env"]
    assert not [claim for claim in Journal(tmp_path / "docker").all() if claim.name == one.name]


async def test_whoever_comes_next_removes_what_a_dead_owner_left(engine: ContainerEngine, tmp_path: Path) -> None:
    lost = provider_at(engine, tmp_path)
    other = provider_at(engine, tmp_path / "other")
    await lost.open()
    await other.open()
    claimed, unclaimed = [await lost.create(SPEC) for _ in range(2)]
    elsewhere = await other.create(SPEC)
    (tmp_path / "docker" / "claims" / unclaimed.name).unlink()  # as after a power cut
    (tmp_path / "docker" / "owners" / f"{claimed.name.split('-')[1]}.lock").unlink()  # as after its end
    async with provider_at(engine, tmp_path):
        assert set(engine.containers) == {elsewhere.name}
        assert Journal(tmp_path / "docker").all() == []
    await other.close()
    await lost.close()
    assert engine.containers == {}


async def test_what_belonged_to_a_directory_that_is_gone_is_removed_by_whoever_comes_next(
    engine: ContainerEngine, tmp_path: Path
) -> None:
    lost = provider_at(engine, tmp_path / "lost")
    await lost.open()
    await lost.create(SPEC)
    shutil.rmtree(tmp_path / "lost")
    async with provider_at(engine, tmp_path / "next"):
        assert engine.containers == {}
    await lost.close()


OWNER = """
import asyncio, os, signal, sys
from pathlib import Path
from rollout_worker.sandboxes.docker import open_docker
from rollout_worker.sandboxes.port import Image, Limits, Spec

async def main():
    async with open_docker(Path(sys.argv[2]), {"host": sys.argv[1]}) as provider:
        await provider.create(Spec(root=Image("small:1"), limits=Limits(0.5, 256)))
        print("made", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_killed_owners_containers_are_removed_with_it(engine: ContainerEngine, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, engine.url, str(tmp_path / "state")]
    owner = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await owner.communicate()
    assert said == b"made\n"
    shutil.rmtree(tmp_path / "state")
    async with asyncio.timeout(60):
        while engine.containers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_living_owners_containers_are_left_alone(
    sandbox: EngineSandbox, engine: ContainerEngine, tmp_path: Path
) -> None:
    async with provider_at(engine, tmp_path):
        assert list(engine.containers) == [sandbox.name]


async def test_a_container_that_does_not_start_leaves_nothing(
    provider: DockerProvider, engine: ContainerEngine, tmp_path: Path
) -> None:
    engine.faults = {("POST", "/start"): 500}
    with pytest.raises(SandboxCreateError, match="told to answer 500"):
        await provider.create(SPEC)
    assert engine.containers == {}
    assert Journal(tmp_path / "docker").all() == []


async def test_what_cannot_be_removed_keeps_its_claim(
    provider: DockerProvider, engine: ContainerEngine, tmp_path: Path
) -> None:
    one = await provider.create(SPEC)
    engine.faults = {("DELETE", one.name): 500}
    with pytest.raises(SandboxTeardownError, match="is not removed"):
        await one.destroy()
    assert [claim.name for claim in Journal(tmp_path / "docker").all()] == [one.name]
    engine.faults = {}
    await one.destroy()
    assert Journal(tmp_path / "docker").all() == []


async def test_sandboxes_wait_for_the_engines_room(provider: DockerProvider) -> None:
    large = Spec(root=Image("small:1"), limits=Limits(3.0, 256))
    async with await provider.create(large) as first:
        with pytest.raises(SandboxNoRoomError):
            await provider.create(large, wait=False)
        waiting = asyncio.ensure_future(provider.create(large))
        await asyncio.sleep(0)
        await first.destroy()
        await (await waiting).destroy()


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (Spec(), "there is no image"),
        (Spec(root=RootFs(Path("/"))), "start from images"),
        (Spec(root=Image("small:1"), limits=Limits(100)), "more than the 4 that"),
        (Spec(root=Image("small:1"), network=Network("allowlist", ("a.test",))), "cannot be enforced"),
        (Spec(root=Image("small:1"), require=frozenset({"storage"})), "by looking now and then"),
    ],
)
async def test_what_cannot_be_kept_is_refused(provider: DockerProvider, spec: Spec, told: str) -> None:
    with pytest.raises(SandboxRefusedError, match=told):
        await provider.create(spec)


@pytest.mark.parametrize("open_provider", [open_docker, open_podman])
async def test_an_engine_that_is_not_there_is_refused(tmp_path: Path, open_provider: Any) -> None:
    with pytest.raises(SandboxRefusedError, match=r"there is no socket /nowhere.*set host under provider_config"):
        await open_provider(tmp_path, {"host": "unix:///nowhere"}).open()


def test_all_faults_of_the_settings_are_told() -> None:
    with pytest.raises(ConfigError) as raised:
        open_docker(Path("/"), {"host": "nowhere", "image": "maybe", "hots": 1})
    for key in ("provider_config.host", "provider_config.image", 'did you mean "host"'):
        assert key in raised.value.message


# Images


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "task/environment").mkdir(parents=True)
    (tmp_path / "task/environment/Dockerfile").write_text("FROM small:1\nENV B=2\nCOPY file /file\n")
    (tmp_path / "task/environment/file").write_text("x")
    return tmp_path / "task"


async def prepared(provider: DockerProvider, task: Path, choice: Any = "auto", **options: Any) -> Any:
    given = (None, task / "environment", Limits(), options.pop("timeout_s", 20.0))
    return await Preparation(provider, Store(task.parent), *given, **options).run(choice)


async def test_a_dockerfile_is_built_once_for_its_content(
    provider: DockerProvider, engine: ContainerEngine, task: Path
) -> None:
    first, second = await asyncio.gather(prepared(provider, task), prepared(provider, task))
    assert first == second
    assert sum(line.endswith("/build") for line in engine.asked) == 1
    (task / "environment/file").write_text("y")
    assert (await prepared(provider, task)).root != first.root
    await prepared(provider, task, anew=True)
    assert sum(line.endswith("/build") for line in engine.asked) == 2  # what this process built is fresh


async def test_a_base_is_pulled_and_the_rest_replayed_where_that_is_asked_for(
    provider: DockerProvider, task: Path
) -> None:
    found = await prepared(provider, task, "pull")
    assert (found.root, found.env, len(found.replay)) == (Image("small:1"), {"B": "2"}, 1)


async def test_a_build_that_fails_is_told_with_what_it_printed(
    provider: DockerProvider, engine: ContainerEngine, task: Path
) -> None:
    engine.build = [{"stream": "Step 1\n"}, {"error": "no such file"}]
    with pytest.raises(ImageBuildError, match=r"no such file.*Step 1"):
        await prepared(provider, task)


async def test_a_build_has_its_time(provider: DockerProvider, engine: ContainerEngine, task: Path) -> None:
    engine.build_s = 30
    with pytest.raises(ImageBuildTimeoutError, match="build_timeout_sec"):
        await prepared(provider, task, timeout_s=0.2)


async def test_an_image_that_is_not_there_is_pulled_or_told(provider: DockerProvider, engine: ContainerEngine) -> None:
    assert (await provider.pull_image("other", timeout_s=9, anew=False)).reference == "other"
    engine.faults = {("POST", "/images/create"): 404}
    with pytest.raises(ImageNotFoundError, match=r"nothing:1 cannot be pulled.*check its name"):
        await provider.pull_image("nothing:1", timeout_s=9, anew=False)


async def test_containers_have_no_hosts_root(provider: DockerProvider, task: Path) -> None:
    with pytest.raises(ImageError, match="leave out image: host"):
        await prepared(provider, task, "host")
