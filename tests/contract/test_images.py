"""What sandboxes begin with: Dockerfiles, registries, layers, and what each provider makes of them."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio
from image_registry import Registry, digest, layer, registry
from rollout_worker.sandboxes.bubblewrap import open_bubblewrap
from rollout_worker.sandboxes.errors import (
    ImageBuildError,
    ImageBuildTimeoutError,
    ImageError,
    ImageNotFoundError,
    ImagePullError,
    ImageToolsMissingError,
    RegistryUnreachableError,
    SandboxRefusedError,
)
from rollout_worker.sandboxes.images import fetch as fetching
from rollout_worker.sandboxes.images import prepare as preparing
from rollout_worker.sandboxes.images import programs
from rollout_worker.sandboxes.images.prepare import Preparation, Prepared
from rollout_worker.sandboxes.images.replay import carry_out
from rollout_worker.sandboxes.images.store import Made, Store
from rollout_worker.sandboxes.port import (
    TASK_DIRECTORIES,
    Host,
    Image,
    ImageChoice,
    Limits,
    Network,
    Provider,
    RootFs,
    Spec,
)
from rollout_worker.sandboxes.process import open_process
from small_root import SHELL, small_root

pytestmark = pytest.mark.asyncio(loop_scope="module")


@cache
def shell_root() -> bytes:
    return small_root(SHELL)


# Registries

LAYER = layer(("x", b"1"))


@pytest_asyncio.fixture(loop_scope="module")
async def here() -> AsyncIterator[Registry]:
    if why := programs.lacking():
        pytest.skip(why)
    async with registry() as one:
        yield one


async def fetched(name: str, tmp_path: Path, *, anew: bool = False) -> Path:
    made, _ = await fetching.fetch(name, Store(tmp_path), 20, anew=anew)
    return made.path / "root"


@pytest.mark.parametrize("packed", ["gzip", "zstd", "plain"])
async def test_an_image_is_fetched_and_unpacked(here: Registry, tmp_path: Path, packed: str) -> None:
    config = {"Env": ["A=1"], "WorkingDir": "/w", "User": "me:us"}
    name = here.add(
        "a/b:1", layer(("x", b"1"), ("y", b"1")), layer((".wh.x", b""), ("z", b"2")), packed=packed, config=config
    )
    made, _ = await fetching.fetch(name, Store(tmp_path), 20, anew=False)
    assert sorted(path.name for path in (made.path / "root").iterdir()) == ["y", "z"]
    assert (made.env, made.workdir, made.user) == ({"A": "1"}, "/w", "me")


async def test_what_was_fetched_is_not_asked_for_again(here: Registry, tmp_path: Path) -> None:
    name = here.add("a:1", LAYER, packed="plain")
    results = await asyncio.gather(*(fetched(name, tmp_path) for _ in range(5)))
    assert len(set(results)) == 1
    assert sum(digest(LAYER) in path for path in here.asked) == 1
    count = len(here.asked)
    assert await fetched(name, tmp_path) == results[0]
    assert len(here.asked) == count


async def test_a_digest_counts_and_not_the_tag_beside_it(here: Registry, tmp_path: Path) -> None:
    name = here.add("a:1", LAYER)
    index = digest(here.manifests["a/1"][1])
    here.manifests[f"a/{index}"] = here.manifests.pop("a/1")
    assert (await fetched(f"{name}@{index}", tmp_path) / "x").read_bytes() == b"1"


async def test_a_token_is_asked_for_where_one_is_wanted(here: Registry, tmp_path: Path) -> None:
    here.token = "secret"
    assert (await fetched(here.add("a:1", layer(("x", b"1"))), tmp_path) / "x").read_bytes() == b"1"


async def test_a_registry_that_is_busy_or_breaks_off_is_asked_again(here: Registry, tmp_path: Path) -> None:
    name = here.add("a:1", layer(("x", os.urandom(5000))))
    here.answers, here.cut = [503, 429], 1000
    assert (await fetched(name, tmp_path) / "x").stat().st_size == 5000


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, ImageNotFoundError), (403, ImageNotFoundError), (429, ImagePullError), (500, ImagePullError)],
)
async def test_what_a_registry_refuses(here: Registry, tmp_path: Path, status: int, kind: type[ImagePullError]) -> None:
    name = here.add("a:1", LAYER)
    here.answers = [status] * 100
    with pytest.raises(ImagePullError) as raised:
        await fetched(name, tmp_path)
    assert (type(raised.value), name in raised.value.message) == (kind, True)
    assert [path.name for path in (tmp_path / "images").glob("*") if path.suffix != ".lock"] == []


async def test_a_layer_with_another_digest_is_refused(here: Registry, tmp_path: Path) -> None:
    name = here.add("a:1", LAYER, packed="plain")
    here.blobs[digest(LAYER)] = layer(("x", b"2"))
    with pytest.raises(ImagePullError, match=r"(?i)digest did not match"):
        await fetched(name, tmp_path)


async def test_no_layer_leads_out_of_the_image(here: Registry, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    links = layer(("usr/lib", None), ("lib", (tarfile.SYMTYPE, "usr/lib")), ("out", (tarfile.SYMTYPE, str(outside))))
    through = layer(("lib/x", b"in"), ("out/x", b"kept in"), ("../../z", b"too"))
    root = await fetched(here.add("a:1", links, through), tmp_path / "state")
    assert (root / "usr/lib/x").read_bytes() == b"in"
    assert (root / "z").is_file()
    assert list(outside.iterdir()) == []


async def test_nobody_at_the_registrys_address(here: Registry, tmp_path: Path) -> None:
    with pytest.raises(RegistryUnreachableError):
        await fetched("127.0.0.1:9/x:1", tmp_path)


# What is kept


async def make_nothing(path: Path) -> Made:
    (path / "data").write_bytes(b"x" * 5000)
    return Made(path)


async def test_a_make_that_fails_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    store = Store(tmp_path)

    async def fail(path: Path) -> Made:
        (path / "half").write_text("x")
        raise ImagePullError("not now")

    with pytest.raises(ImagePullError):
        await store.get("key", fail)
    assert store.find("key") is None
    made = await store.get("key", make_nothing)
    assert sorted(path.name for path in made.path.iterdir()) == ["data", "image.json"]


async def test_what_was_not_used_of_late_makes_room(tmp_path: Path) -> None:
    old, new = Store(tmp_path), Store(tmp_path, keep_bytes=10_000, keep_s=3600)
    for key in ("old", "used"):
        made = await old.get(key, make_nothing)
        os.utime(made.path / "image.json", (0, 0))
    assert old.find("used") is not None
    await new.get("new", make_nothing)
    assert [old.find(key) is not None for key in ("old", "used", "new")] == [False, True, True]


@pytest.mark.parametrize(("code", "remedy"), [(errno.ENOSPC, "make room"), (errno.EROFS, "must write there")])
async def test_a_disk_that_takes_no_more_is_told(tmp_path: Path, code: int, remedy: str) -> None:
    async def fill(path: Path) -> Made:
        raise OSError(code, os.strerror(code), str(path))

    with pytest.raises(ImageError, match=f"{os.strerror(code)}.*{remedy}"):
        await Store(tmp_path).get("key", fill)


async def test_a_program_that_finds_the_disk_full_leaves_nothing(
    here: Registry, tmp_path: Path, small_disk: Callable[[Path, int], None]
) -> None:
    small_disk(tmp_path, 3 << 10)
    name = here.add("a:1", layer(("x", os.urandom(6_000_000))), packed="plain")
    with pytest.raises(ImageError, match=f"the disk of {tmp_path}.* is full"):
        await fetched(name, tmp_path)
    assert [path.suffix for path in (tmp_path / "images").iterdir()] == [".lock"]


# What providers make of it


@dataclass
class Task:
    """A task's directory, with a Dockerfile."""

    directory: Path
    state: Path

    def write(self, text: str, **files: str) -> Path:
        place = self.directory / "environment"
        place.mkdir(parents=True, exist_ok=True)
        for name, data in {"Dockerfile": text, **files}.items():
            (place / name).write_text(data)
        return place

    async def prepare(
        self, what: Path | str, provider: Provider, *, timeout_s: float = 30.0, choice: ImageChoice = "auto"
    ) -> Prepared:
        """`what`: the directory of a Dockerfile, or an image."""
        image, directory = (None, what) if isinstance(what, Path) else (what, None)
        limits = Limits(0.5, 256)
        return await Preparation(provider, Store(self.state), image, directory, limits, timeout_s).run(choice)

    async def output(self, prepared: Prepared, provider: Provider, command: str) -> str:
        spec = Spec(
            root=prepared.root,
            limits=Limits(0.5, 256),
            workdir=prepared.workdir,
            env=prepared.env,
            user=prepared.user,
            directories=(*TASK_DIRECTORIES, *prepared.directories),
        )
        async with await provider.create(spec) as sandbox:
            await carry_out(prepared.replay, sandbox, self.directory / "environment", 30)
            return (await sandbox.exec(command)).check().stdout.text()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture
def task(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    async def none() -> None:
        return None

    monkeypatch.setattr(preparing, "find_builder", none)  # whatever this machine has
    monkeypatch.setattr(fetching, "_unreachable", {"nowhere.test": (1e12, "nowhere.test cannot be reached")})
    return Task(tmp_path / "task", state)


async def opened(provider: Provider) -> Provider:
    await provider.open()
    try:
        await provider.probe()
    except SandboxRefusedError as error:
        await provider.close()
        pytest.skip(error.message)
    return provider


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bubblewrap(state: Path) -> AsyncIterator[Provider]:
    provider = await opened(open_bubblewrap(state))
    yield provider
    await provider.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def process(state: Path) -> AsyncIterator[Provider]:
    provider = await opened(open_process(state))
    yield provider
    await provider.close()


HOSTED = (
    "FROM nowhere.test/x\nENV A=1\nWORKDIR /app\nCOPY data .\nCOPY --chmod=700 data /opt/run/\n"
    "RUN echo $A > /usr/made && cat data >> /usr/made\n"
)


async def test_the_hosts_programs_are_used_where_no_image_can_be_had_and_that_is_told(
    task: Task, bubblewrap: Provider
) -> None:
    prepared = await task.prepare(task.write(HOSTED, data="x\n"), bubblewrap)
    assert "the image nowhere.test/x is not used" in prepared.remarks[0]
    assert "nowhere.test cannot be reached" in prepared.remarks[0]
    assert (prepared.workdir, prepared.env, prepared.replay) == ("/app", {"A": "1"}, ())
    assert await task.output(prepared, bubblewrap, "cat /usr/made data; stat -c %a /opt/run/data") == "1\nx\nx\n700\n"
    assert not Path("/usr/made").exists()


async def test_a_build_is_done_once_and_again_when_a_file_changed(task: Task, bubblewrap: Provider) -> None:
    environment = task.write("FROM nowhere.test/x\nCOPY data /\nRUN date +%N > /when\n", data="x")
    first, same = [await task.prepare(environment, bubblewrap) for _ in range(2)]
    changed = await task.prepare(
        task.write("FROM nowhere.test/x\nCOPY data /\nRUN date +%N > /when\n", data="y"), bubblewrap
    )
    times = [await task.output(one, bubblewrap, "cat /when") for one in (first, same, changed)]
    assert times[0] == times[1] != times[2]
    assert first.image_key == same.image_key != changed.image_key


async def test_a_run_that_fails_fails_the_build_with_what_it_printed(task: Task, bubblewrap: Provider) -> None:
    environment = task.write("FROM nowhere.test/x\nRUN echo about to fail; exit 3\n")
    with pytest.raises(ImageBuildError, match=r"line 2: RUN .* 3: about to fail"):
        await task.prepare(environment, bubblewrap)


async def test_a_build_has_its_time(task: Task, bubblewrap: Provider) -> None:
    environment = task.write("FROM nowhere.test/x\nRUN sleep 1000\n")
    with pytest.raises(ImageBuildTimeoutError, match=r"line 2.*build_timeout_sec"):
        await task.prepare(environment, bubblewrap, timeout_s=0.3)


async def test_without_overlays_the_build_is_done_in_each_sandbox(task: Task) -> None:
    provider = await opened(open_bubblewrap(task.state, overlay=False))
    try:
        prepared = await task.prepare(task.write("FROM nowhere.test/x\nWORKDIR /app\nRUN echo made > it\n"), provider)
        assert prepared.replay
        assert await task.output(prepared, provider, "cat it") == "made\n"
    finally:
        await provider.close()


async def test_an_image_of_a_registry_is_the_root(task: Task, bubblewrap: Provider, here: Registry) -> None:
    config = {"Env": ["PATH=/bin", "FROM_IMAGE=1"], "WorkingDir": "/root"}
    name = here.add("small:1", shell_root(), layer(("etc/only-here", b"of the image\n")), config=config, packed="plain")
    prepared = await task.prepare(name, bubblewrap)
    assert isinstance(prepared.root, RootFs)
    assert prepared.remarks == ()
    assert (
        await task.output(prepared, bubblewrap, "cat /etc/only-here; echo $FROM_IMAGE; pwd")
        == "of the image\n1\n/root\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="others make no devices")
async def test_devices_of_an_image_are_out_of_reach(task: Task, bubblewrap: Provider, here: Registry) -> None:
    name = here.add("small:1", shell_root(), layer(("null", (tarfile.CHRTYPE, ""))), config={"Env": ["PATH=/bin"]})
    prepared = await task.prepare(name, bubblewrap)
    assert await task.output(prepared, bubblewrap, "test -c /null && true > /null || echo closed") == "closed\n"


async def test_a_dockerfile_is_built_upon_a_fetched_base(task: Task, bubblewrap: Provider, here: Registry) -> None:
    name = here.add("small:1", shell_root(), config={"Env": ["PATH=/bin"]}, packed="plain")
    environment = task.write(f"FROM {name}\nENV PATH=/opt:$PATH\nRUN rm /etc/group && echo made > /made\n")
    prepared = await task.prepare(environment, bubblewrap)
    assert prepared.env["PATH"] == "/opt:/bin"
    assert await task.output(prepared, bubblewrap, "cat /made; test -e /etc/group || echo gone") == "made\ngone\n"
    base = await task.prepare(name, bubblewrap)
    assert await task.output(base, bubblewrap, "test -e /made || echo clean") == "clean\n"


async def test_an_image_root_is_fetched_by_the_provider_itself(
    task: Task, bubblewrap: Provider, here: Registry
) -> None:
    name = here.add("small:1", shell_root(), packed="plain")
    async with await bubblewrap.create(
        Spec(root=Image(name), limits=Limits(0.5, 256), network=Network("host"))
    ) as sandbox:
        assert (await sandbox.exec("ls /")).check().stdout.text().split()[0] == "bin"


async def test_a_dockerfile_that_would_change_this_host_needs_leave(task: Task, process: Provider) -> None:
    environment = task.write("FROM x\nWORKDIR /app\nCOPY data /app/\nRUN true\nCOPY data /opt/data\n", data="x")
    with pytest.raises(ImageBuildError, match=r"line 4: RUN true; line 5: .*/opt/data"):
        await task.prepare(environment, process)
    assert (await task.prepare(environment, process, choice="host")).replay


async def test_private_directories_are_filled_in_each_process_sandbox(task: Task, process: Provider) -> None:
    environment = task.write("FROM x\nWORKDIR /work-of-task\nCOPY data deep/\nENV A=1\n", data="x\n")
    prepared = await task.prepare(environment, process)
    assert "its files can be read" in prepared.remarks[0]
    assert prepared.directories == ("/work-of-task",)
    assert await task.output(prepared, process, "pwd; cat deep/data; echo $A") == "/work-of-task\nx\n1\n"
    assert not Path("/work-of-task").exists()


async def test_an_images_user_is_told_of_where_there_are_no_users(task: Task) -> None:
    async with open_process(task.state, namespaces=False) as provider:
        prepared = await task.prepare(task.write("FROM x\nUSER me\n"), provider)
    assert prepared.user is None
    assert prepared.remarks[-1].startswith("commands do not run as the image's user me")


@pytest.mark.parametrize("choice", ["pull", "build"])
async def test_process_sandboxes_have_no_image(task: Task, process: Provider, choice: ImageChoice) -> None:
    with pytest.raises(ImageError, match="needs bubblewrap, docker or podman"):
        await task.prepare("x", process, choice=choice)


async def test_what_was_asked_for_is_not_replaced(task: Task, bubblewrap: Provider) -> None:
    with pytest.raises(RegistryUnreachableError):
        await task.prepare("nowhere.test/x", bubblewrap, choice="pull")
    with pytest.raises(ImageBuildError, match="docker works here"):
        await task.prepare(task.write("FROM x\n"), bubblewrap, choice="build")
    with pytest.raises(ImageError, match="nothing to build"):
        await task.prepare("x", bubblewrap, choice="build")


# What builds, for this host


@pytest.fixture
def buildah(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if programs.lacking() or shutil.which("buildah") is None:
        pytest.skip("there is no buildah, skopeo or umoci")
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/containers"\nrunroot = "{tmp_path}/running"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setattr(programs, "BUILDERS", ("buildah",))
    monkeypatch.setattr(programs, "_found", [])


@pytest.fixture
def building(task: Task, buildah: None, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(preparing, "find_builder", programs.find_builder)
    task.write("", data="x\n")
    (task.directory / "environment/root.tar").write_bytes(shell_root())
    return task


async def test_a_dockerfile_with_stages_is_built_and_unpacked(building: Task, bubblewrap: Provider) -> None:
    stages = "FROM scratch AS base\nADD root.tar /\nENV PATH=/bin BUILT=1\nWORKDIR /tmp\nFROM base AS maker\n"
    environment = building.write(f"{stages}RUN echo made > /made\nFROM base\nCOPY --from=maker /made /\n")
    prepared = await building.prepare(environment, bubblewrap)
    assert await building.output(prepared, bubblewrap, "cat /made; echo $BUILT; pwd") == "made\n1\n/tmp\n"
    assert (await building.prepare(environment, bubblewrap)).root == prepared.root


async def test_a_build_starts_with_an_image_of_a_registry_on_this_host(
    building: Task, here: Registry, bubblewrap: Provider
) -> None:
    """Such a registry speaks HTTP."""
    environment = building.write(f"FROM {here.add('base:1', shell_root())}\nRUN echo made > /made\n")
    prepared = await building.prepare(environment, bubblewrap)
    assert await building.output(prepared, bubblewrap, "cat /made") == "made\n"


async def test_a_build_that_fails_is_told_with_what_it_printed(building: Task, bubblewrap: Provider) -> None:
    environment = building.write("FROM scratch\nADD root.tar /\nRUN echo about to fail; exit 7\n")
    with pytest.raises(ImageBuildError, match="about to fail"):
        await building.prepare(environment, bubblewrap)


async def test_a_build_that_hangs_ends_with_all_its_processes(building: Task, bubblewrap: Provider) -> None:
    environment = building.write("FROM scratch\nADD root.tar /\nRUN while :; do /bin/test x; done\n")
    with pytest.raises(ImageBuildTimeoutError, match="build_timeout_sec"):
        await building.prepare(environment, bubblewrap, timeout_s=3.0)


# Where the programs are missing


async def test_without_tools_images_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    async with open_bubblewrap(tmp_path, {"image": "pull"}, program="/bin/sh") as provider:
        with pytest.raises(SandboxRefusedError, match="apt-get install skopeo umoci"):
            await provider.probe()


async def test_without_tools_the_hosts_programs_are_used_only_where_that_is_allowed(
    task: Task, bubblewrap: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs.shutil, "which", lambda name: None)
    environment = task.write("FROM elsewhere.test/x\n")
    with pytest.raises(ImageToolsMissingError):
        await task.prepare(environment, bubblewrap, choice="pull")
    prepared = await task.prepare(environment, bubblewrap)
    assert "images need skopeo and umoci" in prepared.remarks[0]


async def test_what_another_sandbox_wrote_cannot_be_had_where_nothing_is_laid_over(
    process: Provider, tmp_path: Path
) -> None:
    with pytest.raises(SandboxRefusedError, match="no overlay mounts"):
        await process.create(replace(Spec(), root=Host(tmp_path)))
