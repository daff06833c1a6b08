"""Cases on files and trees in both directions, whatever either side holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from rollout_worker.sandboxes.conformance.suite import (
    PATIENCE_S,
    Bench,
    NotConformingError,
    on_shared,
    output_of,
    raises,
    same,
    true,
)
from rollout_worker.sandboxes.errors import (
    SandboxFileError,
)
from rollout_worker.sandboxes.port import (
    MIB,
    Sandbox,
)
from rollout_worker.sandboxes.trees import Selection


@on_shared
async def files_are_written_and_read(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    data = os.urandom(3 * MIB)
    await sandbox.write_file(f"{place}/a/b/data", data, mode=0o755)
    true(await sandbox.read_file(f"{place}/a/b/data") == data, "other bytes were read than written")
    same(await output_of(sandbox, f"stat -c %a {place}/a/b/data"), "755", "its mode")
    await sandbox.write_file(f"{place}/a/b/data", b"shorter")
    same(await sandbox.read_file(f"{place}/a/b/data"), b"shorter", "what replaced it")
    await sandbox.write_file("relative", b"r")
    same(await output_of(sandbox, "cat relative"), "r", "a relative path")


NAMES = ("a b", "ü-ß-日本", "quo'te\"", "new\nline", "-rf", "back\\slash", "star*", "…", " lead", "semi;colon", "%s")


@on_shared
async def names_of_every_kind(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    for name in NAMES:
        await sandbox.write_file(f"{place}/{name}", name.encode())
    for name in NAMES:
        same(await sandbox.read_file(f"{place}/{name}"), name.encode(), f"what is in {name!r}")
    target = bench.directory()
    moved = await sandbox.download(place, target)
    same((moved.files, moved.skipped), (len(NAMES), ()), "files that were downloaded")
    same(sorted(p.name for p in target.iterdir()), sorted(NAMES), "their names")


@on_shared
async def what_cannot_be_read(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    (await sandbox.exec(f"cd {place}; mkfifo pipe; echo 12345 > five; ln -s loop loop")).check()
    async with raises(SandboxFileError, reason="ENOENT"):
        await sandbox.read_file(f"{place}/nothing")
    async with raises(SandboxFileError, reason="EISDIR"):
        await sandbox.read_file(place)
    async with raises(SandboxFileError, reason="EINVAL"):  # and it does not wait for a writer
        await sandbox.read_file(f"{place}/pipe")
    async with raises(SandboxFileError, reason="EINVAL"):
        await sandbox.read_file("/dev/zero")
    async with raises(SandboxFileError, reason="ELOOP"):
        await sandbox.read_file(f"{place}/loop")
    async with raises(SandboxFileError, reason="too_large"):
        await sandbox.read_file(f"{place}/five", max_bytes=5)
    same(await sandbox.read_file(f"{place}/five", max_bytes=6), b"12345\n", "a file of that size")


@on_shared
async def what_cannot_be_written(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.write_file(f"{place}/file", b"x")
    async with raises(SandboxFileError, reason="EISDIR"):
        await sandbox.write_file(place, b"x")
    async with raises(SandboxFileError, reason="ENOTDIR"):
        await sandbox.write_file(f"{place}/file/inner", b"x")


def plant(top: Path) -> dict[str, bytes]:
    """Make a tree with every kind of entry; return the contents of its files."""
    found = {"one": b"1", "a/two": b"22", "a/b/three": os.urandom(300_000), "a b/ü": b"x", "empty": b""}
    for name, data in found.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (top / "a/two").chmod(0o750)
    (top / "nothing").mkdir()
    return found


def files_of(top: Path) -> dict[str, bytes]:
    return {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file() and not p.is_symlink()}


@on_shared
async def trees_go_there_and_back(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    source, target = bench.directory(), bench.directory()
    found = plant(source)
    sent = await sandbox.upload(source, f"{place}/new/tree")
    same((sent.files, sent.size, sent.skipped), (5, sum(map(len, found.values())), ()), "what was uploaded")
    same(
        await output_of(sandbox, f"stat -c %a {place}/new/tree/a/two; ls -d {place}/new/tree/nothing"),
        f"750\n{place}/new/tree/nothing",
        "a mode, and an empty directory",
    )
    got = await sandbox.download(f"{place}/new/tree", target / "deep" / "er")
    same((got.files, got.size, got.skipped), (5, sent.size, ()), "what was downloaded")
    same(files_of(target / "deep" / "er"), found, "the files")
    same((target / "deep/er/a/two").stat().st_mode & 0o777, 0o750, "a mode")
    true((target / "deep/er/nothing").is_dir(), "an empty directory is lost")


@on_shared
async def single_files_go_there_and_back(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    directory = bench.directory()
    (directory / "in").write_bytes(b"single")
    await sandbox.upload(directory / "in", f"{place}/x/renamed")
    same(await sandbox.read_file(f"{place}/x/renamed"), b"single", "what was uploaded")
    moved = await sandbox.download(f"{place}/x/renamed", directory / "y" / "out")
    same(((directory / "y" / "out").read_bytes(), moved.files, moved.size), (b"single", 1, 6), "what was downloaded")


@on_shared
async def uploaded_links_are_not_followed(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    source = bench.directory()
    secret = bench.directory() / "secret"
    secret.write_text("of the host")
    (source / "file").symlink_to(secret)
    (source / "directory").symlink_to(secret.parent)
    (source / "loop").symlink_to("loop")
    (source / "up").symlink_to("..")
    (source / "inner").mkdir()
    (source / "inner" / "round").symlink_to("../inner")
    await sandbox.upload(source, place)
    found = await output_of(sandbox, f"cd {place}; for f in file directory loop up inner/round; do readlink $f; done")
    same(found.splitlines(), [str(secret), str(secret.parent), "loop", "..", "../inner"], "the links")


@on_shared
async def downloads_stay_in_their_target(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.exec(
        f"cd {place}; mkdir -p tree/d; cd tree; echo in > in; ln -s /etc/passwd absolute; ln -s ../.. up;"
        " ln -s in fine; ln -s ../in d/fine; ln -s . d/self; ln -s self/../../.. d/out; ln -s d/nowhere dangling;"
        " ln -s loop loop; ln -s d/../../x lexical"
    )
    top = bench.directory()
    moved = await sandbox.download(f"{place}/tree", top / "target")
    same([p.name for p in top.iterdir()], ["target"], "what is beside the target")
    links = {str(p.relative_to(top / "target")) for p in (top / "target").rglob("*") if p.is_symlink()}
    same(links, {"fine", "d/fine", "d/self", "dangling", "loop"}, "links that were made")
    same({name for name, _ in moved.skipped}, {"absolute", "up", "d/out", "lexical"}, "links that were skipped")
    same((top / "target" / "d" / "fine").read_text(), "in\n", "what is behind a link")


@on_shared
async def downloads_skip_what_is_no_file(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.exec(f"cd {place}; mkfifo pipe; echo x > file")
    moved = await asyncio.wait_for(sandbox.download(place, bench.directory()), PATIENCE_S)
    same((moved.files, [name for name, _ in moved.skipped]), (1, ["pipe"]), "what was downloaded and skipped")


@on_shared
async def downloads_are_bounded(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.exec(f"cd {place}; head -c 100000 /dev/zero > a; head -c 100000 /dev/zero > b; truncate -s 1500M c")
    async with raises(SandboxFileError, reason="too_large"):
        await sandbox.download(place, bench.directory(), max_bytes=150_000)
    async with raises(SandboxFileError, reason="too_large"):
        await sandbox.download(f"{place}/c", bench.directory() / "c", max_bytes=1000 * MIB)
    async with raises(SandboxFileError, reason="ENOENT"):
        await sandbox.download(f"{place}/nothing", bench.directory())


@on_shared
async def downloads_take_what_is_selected(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.exec(
        f"cd {place}; mkdir -p node_modules/deep src/node_modules build; echo x > node_modules/deep/a;"
        " echo x > src/node_modules/b; echo x > src/c.pyc; echo kept > src/kept; echo x > build/out;"
        " head -c 100000 /dev/zero > large; ln -s src/kept link"
    )
    target = bench.directory()
    selection = Selection(("node_modules", "*.pyc", "build/out"), file_bytes=50_000, max_bytes=60_000, max_entries=100)
    moved = await sandbox.download(place, target, selection=selection)
    found = {str(p.relative_to(target)) for p in target.rglob("*") if not p.is_dir()}
    same((found, (target / "src" / "kept").read_text()), ({"link", "src/kept"}, "kept\n"), "what was downloaded")
    ignored = {"node_modules", "src/node_modules", "src/c.pyc", "build/out"}
    why = {**dict.fromkeys(ignored, "ignored"), "large": "file_too_large"}
    same((dict(moved.skipped), moved.left_out), (why, len(why)), "what was left out")
    await sandbox.exec(f"ln -s {place} {place}-link")
    async with raises(SandboxFileError, reason="ELOOP"):
        await sandbox.download(f"{place}-link", bench.directory(), selection=selection)
    for most in (Selection((), 50_000, 0, 100), Selection((), 50_000, 60_000, 0)):
        emptied = bench.directory()
        await sandbox.download(place, emptied, selection=most)
        same([p for p in emptied.rglob("*") if p.is_file()], [], "files beyond the bounds")


@on_shared
async def uploads_do_not_follow_links_in_the_way(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.exec(
        f"cd {place}; mkdir target elsewhere; ln -s ../elsewhere target/a; ln -s ../elsewhere/x target/one"
    )
    source = bench.directory()
    plant(source)
    async with raises(SandboxFileError):
        await sandbox.upload(source, f"{place}/target")
    same(await output_of(sandbox, f"ls {place}/elsewhere"), "", "what was written through the links")
    with contextlib.suppress(FileNotFoundError):
        await sandbox.upload(source / "missing", f"{place}/x")
        raise NotConformingError("a missing source was no FileNotFoundError")
