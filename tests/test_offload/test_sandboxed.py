"""Tests in sandboxes: a copy of the project each, and an environment that is made once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout.objects.digest import hash_file
from rollout.workloads.test.cases import Outcome, Try
from rollout.workloads.test.downloads import download
from rollout.workloads.test.run_config import RunConfig
from rollout_worker.sandboxes.errors import ImageBuildError, SandboxRefusedError
from rollout_worker.testing.downloads import gather
from rollout_worker.testing.host import Host
from rollout_worker.testing.place import LocalPlace, Place
from rollout_worker.testing.sandboxed import Sandboxes
from test_offload.suites import RUNNER, write

SUITE = """
import os, pathlib, time
def test_place(): print(pathlib.Path("made").read_text(), os.environ["COLOUR"]); pathlib.Path("new").write_text("x")
def test_exit(): os._exit(4)
def test_hang(): time.sleep(1000)
def test_last(): assert pathlib.Path("new").exists()
"""
TEMPLATES = {
    "create_command": "mktemp -d",
    "exec_command": "cd {sandbox_id} && sh -c {command}",
    "destroy_command": "rm -rf {sandbox_id}",
}


def config(tree: Path, init: str, **provider: Any) -> RunConfig:
    return RunConfig(
        root=str(tree),
        tree="00",
        env={"COLOUR": "red"},
        provider=provider,
        sandbox={"init_cmd": init},
        groups={},
        copies={},
    )


def sandboxes(tmp_path: Path, tree: Path, init: str, **provider: Any) -> Sandboxes:
    return Sandboxes(config(tree, init, **provider), tree, tmp_path / "state", RUNNER)


async def said(place: Place, words: Sequence[str]) -> tuple[int | None, str]:
    out = bytearray()
    process = await place.start(words, lambda _, data: out.extend(data))
    process.close_input()
    await process.wait()
    return process.code, out.decode()


@pytest.mark.parametrize(
    "provider", [{"type": "process"}, pytest.param({"type": "default", **TEMPLATES}, marks=pytest.mark.slow)]
)
async def test_each_sandbox_has_the_project_and_ends_what_hangs(tmp_path: Path, provider: dict[str, str]) -> None:
    tree = write(tmp_path / "tree", {"test_a.py": SUITE})
    made = sandboxes(tmp_path, tree, "echo ready > made", **provider)
    await made.open()
    try:
        place = await made.place()
        host = Host(place, [sys.executable], ["-p", "no:cacheprovider"])
        ids = [f"test_a.py::test_{name}" for name in ("place", "exit", "hang", "last")]
        tries: dict[str, Try] = {}
        await host.run(ids, 2.0, lambda _: None, tries)
        assert [tries[one].outcome for one in ids] == [Outcome.PASSED, Outcome.CRASHED, Outcome.TIMEOUT, Outcome.PASSED]
        assert tries[ids[0]].stdout == "ready\n red\n" and "in test_hang" in tries[ids[2]].details
        assert await host.close() == ""
        async with place.directory() as directory:
            await said(place, ["sh", "-c", f"echo result > {directory.name}/file"])
            assert (await directory.bring() / "file").read_text() == "result\n"
        await place.close()
        fresh = await made.place()
        assert (await said(fresh, ["ls"]))[1].split() == ["made", "test_a.py"]
        await fresh.close()
    finally:
        await made.close()
    assert [path.name for path in tree.iterdir()] == ["test_a.py"]


async def test_files_that_match_are_brought(tmp_path: Path) -> None:
    archives: list[Path] = []

    async def put(archive: Path) -> bytes:
        archives.append(Path(shutil.copy(archive, tmp_path / "files.tar")))
        return hash_file(archive)[0]

    async def fetch(_: bytes, path: Path) -> None:
        shutil.copy(archives[0], path)

    tree = write(tmp_path / "tree", {"shots/a b.png": "1", "shots/deep/ü.png": "2", "other/c.png": "", "d.png": "3"})
    made = sandboxes(tmp_path, tree, "ln -s /etc/hostname shots/link.png", type="process")
    await made.open()
    try:
        place = await made.place()
        assert await gather(place, ["*.txt"], put) is None
        local = LocalPlace(RUNNER, tree, {})
        for one in (place, local):
            name = await gather(one, ["shots/**/*.png", "./*.png"], put)
            assert name is not None
            output = tmp_path / one.__class__.__name__
            (output / "downloads" / "d.png").mkdir(parents=True)  # of another batch
            await download(name, output, fetch)
            assert [path.name for path in output.iterdir()] == ["downloads"]
        await place.close()
    finally:
        await made.close()
    for directory in ("SandboxPlace", "LocalPlace"):
        found = {path.relative_to(tmp_path / directory).as_posix() for path in (tmp_path / directory).rglob("*.png")}
        assert found == {"downloads/d.png", "downloads/shots/a b.png", "downloads/shots/deep/ü.png"}


@pytest.mark.parametrize("kind", ["process", "bubblewrap"])
async def test_further_directories_are_copied(tmp_path: Path, kind: str) -> None:
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    tree, more = write(tmp_path / "tree", {"a.txt": ""}), write(tmp_path / "more", {"b/c.txt": "copied"})
    made = Sandboxes(config(tree, "ls", type=kind), tree, tmp_path / "state", RUNNER, [(more, "/more")])
    try:
        await made.open()
        place = await made.place()
        assert await said(place, ["sh", "-c", "cat /more/b/c.txt 2>&- || cat ~/more/b/c.txt"]) == (0, "copied")
        await place.close()
    except SandboxRefusedError as error:
        pytest.skip(error.message)
    finally:
        await made.close()


async def test_what_fails_to_prepare_a_sandbox_is_told(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"a.txt": ""})
    made = sandboxes(tmp_path, tree, "echo no such package >&2; exit 7", type="process")
    await made.open()
    try:
        with pytest.raises(ImageBuildError, match="exit code 7: no such package"):
            await made.place()
    finally:
        await made.close()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
async def test_the_environment_is_made_once_for_each_content_of_the_lock_files(tmp_path: Path) -> None:
    async def look(files: dict[str, str]) -> tuple[str, str]:
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        tree = write(tmp_path / "tree", files)
        made = sandboxes(tmp_path, tree, "cat /proc/sys/kernel/random/uuid > made; touch /opt/made", type="bubblewrap")
        try:
            await made.open()
            place = await made.place()
            code, environment = await said(place, ["cat", "made", "/opt/made"])
            assert code == 0
            return environment, (await said(place, ["sh", "-c", "ls *.py; cat *.py"]))[1]
        except SandboxRefusedError as error:
            pytest.skip(error.message)
        finally:
            await made.close()

    first, files = await look({"uv.lock": "1", "a.py": "old\n", "b.py": ""})
    assert files == "a.py\nb.py\nold\n"
    again, files = await look({"uv.lock": "1", "a.py": "new\n"})
    assert again == first and files == "a.py\nnew\n"
    assert (await look({"uv.lock": "2", "a.py": ""}))[0] != first
