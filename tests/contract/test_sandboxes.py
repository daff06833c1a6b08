"""What lies below the providers of this host, and what is theirs alone."""

from __future__ import annotations

import asyncio
import io
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from rollout.model.errors import ConfigError
from rollout_worker.sandboxes import cgroups, roots, trees
from rollout_worker.sandboxes.allowlist import Allowlist, is_own
from rollout_worker.sandboxes.bubblewrap import open_bubblewrap
from rollout_worker.sandboxes.claims import Capacity, Claim, Journal
from rollout_worker.sandboxes.conformance import local_bench, run
from rollout_worker.sandboxes.errors import (
    SandboxCreateError,
    SandboxGoneError,
    SandboxNoRoomError,
    SandboxRefusedError,
)
from rollout_worker.sandboxes.keeping import Zygote
from rollout_worker.sandboxes.local import LocalProvider
from rollout_worker.sandboxes.output import Capture
from rollout_worker.sandboxes.port import Limits, Network, Price, RootFs, Spec
from rollout_worker.sandboxes.process import open_process
from rollout_worker.sandboxes.providers import open_provider
from rollout_worker.sandboxes.proxy import Proxy

# What a command printed


def capture(tmp_path: Path, *pieces: bytes, keep: int = 4, file_bytes: int = 1 << 20):
    gathered = Capture(keep, lambda: tmp_path / "output", file_bytes)
    for piece in pieces:
        gathered.feed(piece)
    return gathered.close()


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_short_output_is_kept_whole(tmp_path: Path, cut: int) -> None:
    data = b"12345678"
    output = capture(tmp_path, *(data[i : i + cut] for i in range(0, 8, cut)))
    assert (output.head + output.tail, output.size, output.missing, output.file) == (data, 8, 0, None)


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
def test_long_output_keeps_head_tail_and_a_file(tmp_path: Path, cut: int) -> None:
    data = bytes(range(97, 97 + 25))
    output = capture(tmp_path, *(data[i : i + cut] for i in range(0, 25, cut)))
    assert (output.head, output.tail, output.size, output.missing) == (b"abcd", b"vwxy", 25, 17)
    assert output.file is not None
    assert output.file.read_bytes() == data
    assert "17 bytes left out" in output.text()


def test_the_file_is_bounded_and_the_tail_goes_on(tmp_path: Path) -> None:
    output = capture(tmp_path, b"0123456789", b"abcdefghij", file_bytes=12)
    assert (output.in_file, output.size, output.tail) == (12, 20, b"ghij")
    assert (tmp_path / "output").read_bytes() == b"0123456789ab"


# Trees


@pytest.mark.parametrize(
    ("link", "depth", "inside"),
    [
        ("a", 0, True),
        ("a/./b", 0, True),
        ("..", 0, False),
        ("..", 1, True),
        ("../..", 1, False),
        ("../x/y", 1, True),
        ("x/..", 3, False),  # x may be a link, and then its parent is elsewhere
        ("/etc", 3, False),
        ("../../..", 3, True),
    ],
)
def test_links_that_stay_inside(link: str, depth: int, inside: bool) -> None:
    assert trees.stays_inside(link, depth) is inside


def archive(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """(name, type, content or target), after a directory as the top."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for name, kind, content in ((".", tarfile.DIRTYPE, ""), *members):
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o7777
            if kind == tarfile.REGTYPE:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content.encode()))
            else:
                member.linkname = content
                tar.addfile(member)
    stream.seek(0)
    return stream


FILE, LINK = tarfile.REGTYPE, tarfile.SYMTYPE


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a//b", "./x"])
def test_hostile_names_are_skipped(tmp_path: Path, name: str) -> None:
    moved = trees.unpack(archive((name, FILE, "x"), ("fine", FILE, "y")), str(tmp_path / "target"), leave=False)
    assert [p.name for p in tmp_path.rglob("*")] == ["target", "fine"]
    assert [skipped for skipped, _ in moved.skipped] == [name]


def test_names_that_others_cannot_hold_are_escaped_or_skipped(tmp_path: Path) -> None:
    bad = os.fsdecode(b"a\xff")
    stream = archive((f"{bad}/{bad}", FILE, "x"), ("d/" * 100 + "d", FILE, ""), ("/".join(["n" * 200] * 3), FILE, ""))
    moved = trees.unpack(stream, str(tmp_path / "target"), leave=False)
    assert [p.name for p in tmp_path.rglob("*")] == ["target", r"a\xff", r"a\xff"]
    assert len(moved.skipped) == 2


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    stream = archive(("way", LINK, "../outside"), ("way/file", FILE, "x"))
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        trees.unpack(stream, str(tmp_path / "target"), leave=True)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("kept")
    stream = archive(("way", LINK, "../outside"), ("way", FILE, "x"))
    trees.unpack(stream, str(tmp_path / "target"), leave=True)
    assert (tmp_path / "outside").read_text() == "kept"
    assert (tmp_path / "target" / "way").read_text() == "x"


def test_privileges_and_devices_do_not_arrive(tmp_path: Path) -> None:
    stream = archive(("file", FILE, "x"), ("device", tarfile.CHRTYPE, ""), ("hard", tarfile.LNKTYPE, "/etc/passwd"))
    moved = trees.unpack(stream, str(tmp_path / "target"), leave=False)
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["file"]
    assert (tmp_path / "target" / "file").stat().st_mode & 0o7000 == 0
    assert [name for name, _ in moved.skipped] == ["device", "hard"]


def test_many_empty_files_are_too_large(tmp_path: Path) -> None:
    stream = archive(*((f"f{n}", FILE, "") for n in range(30)))
    with pytest.raises(trees.TooLargeError):
        trees.unpack(stream, str(tmp_path / "target"), leave=False, max_bytes=10_000)


def test_too_many_files_are_given_up_at_once_by_both_sides(tmp_path: Path) -> None:
    stream = archive(*((f"f{n}", FILE, "") for n in range(30)))
    with pytest.raises(trees.TooManyError):
        trees.unpack(stream, str(tmp_path / "target"), leave=False, max_entries=29)
    (tmp_path / "target" / "f29").touch()
    with pytest.raises(trees.TooManyError):
        trees.pack(str(tmp_path / "target"), io.BytesIO(), max_entries=29)
    assert trees.pack(str(tmp_path / "target"), io.BytesIO(), max_entries=30).files == 30


def test_a_file_that_shrinks_while_it_is_packed_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 10)
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    assert trees._Exactly(fd, 14).read(14) == b"a" * 10 + bytes(4)
    os.close(fd)


def test_trees_of_any_depth_are_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    fd = os.open(tmp_path, os.O_RDONLY)
    for name in ["top"] + ["d" * 200] * 60:  # far beyond PATH_MAX
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    (top / "file").write_text("x")
    (top / "link").symlink_to(tmp_path)
    trees.remove(str(top))
    assert list(tmp_path.iterdir()) == []
    trees.remove(str(top))


# Allowlists


def test_allowlist_of_names_and_blocks() -> None:
    allowed = Allowlist(["pypi.org", "*.example.com", "10.0.0.0/8", "192.0.2.7", "2001:db8::/32"])
    address = ipaddress.ip_address
    public = address("93.184.216.34")
    assert allowed.may_connect("PyPI.org.", public)
    assert allowed.may_connect("a.b.example.com", public)
    assert not allowed.may_connect("example.com", public)
    assert not allowed.may_connect("notpypi.org", public)
    assert not allowed.may_connect("pypi.org.evil.test", public)
    assert allowed.may_connect("192.0.2.7", address("192.0.2.7"))
    assert not allowed.may_connect("192.0.2.8", address("192.0.2.8"))
    assert allowed.may_connect("::ffff:10.1.2.3", address("::ffff:10.1.2.3"))
    assert allowed.may_connect("[2001:db8::1]", address("2001:db8::1"))


NOT_PUBLIC = ["127.0.0.1", "169.254.169.254", "0.0.0.0", "10.1.2.3", "100.64.0.1", "224.0.0.1", "::1", "fe80::1"]
NOT_PUBLIC += ["fd00:ec2::254", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"]


@pytest.mark.parametrize("special", NOT_PUBLIC)
def test_a_name_gives_no_way_to_what_is_not_public(special: str) -> None:
    address = ipaddress.ip_address(special)
    assert not Allowlist(["pypi.org"]).may_connect("pypi.org", address)
    assert Allowlist(["pypi.org", special]).may_connect("pypi.org", address)


def test_a_name_gives_no_way_to_an_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    own, public = (ipaddress.ip_address(a) for a in ("127.0.0.1", "93.184.216.34"))
    assert is_own(own)
    assert not is_own(public)
    monkeypatch.setattr("rollout_worker.sandboxes.allowlist.is_own", lambda address: True)
    assert not Allowlist(["pypi.org"]).may_connect("pypi.org", public)


@pytest.mark.parametrize(
    "entry", ["", "a b", "http://x.org", "*", "*.", "x.*.org", "1.2.3.4.5", "10.0.0.0/40", "x:443"]
)
def test_faults_of_an_allowlist(entry: str) -> None:
    assert len(Allowlist.faults([entry])) == 1


async def proxied(allowlist: Allowlist, *request: bytes) -> bytes:
    """What the proxy answers to one connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    proxy = Proxy(allowlist)
    await proxy.start(listener)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\r\n".join(request) + b"\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer
    finally:
        await proxy.stop()


@pytest.fixture
async def origin() -> AsyncIterator[tuple[int, list[bytes]]]:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], heads
    server.close()


async def test_plain_http_goes_through_one_request_a_connection(origin: tuple[int, list[bytes]]) -> None:
    port, heads = origin
    line = f"GET http://127.0.0.1:{port}/a?b=c HTTP/1.1".encode()
    answer = await proxied(
        Allowlist(["127.0.0.1"]), line, b"Host: x", b"Proxy-Authorization: s", b"Connection: keep-alive"
    )
    assert answer.endswith(b"hi")
    assert heads == [f"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()]


@pytest.mark.parametrize("field", [b"Host : x", b" Host: x", b"A: b\nHost: x", b"A: b\rHost: x", b"Host"])
async def test_a_head_that_a_server_could_read_otherwise_is_refused(
    origin: tuple[int, list[bytes]], field: bytes
) -> None:
    port, heads = origin
    target = f"http://127.0.0.1:{port}/".encode()
    for head in ((b"GET " + target + b" HTTP/1.1", field), (b"GET " + target + b" HTTP/1.1\n" + field.strip(),)):
        assert (await proxied(Allowlist(["127.0.0.1"]), *head)).split(b" ")[1] == b"400"
    assert heads == []


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET / HTTP/1.1", b"400"),
        (b"GET https://127.0.0.1/ HTTP/1.1", b"400"),
        (b"CONNECT 127.0.0.1 HTTP/1.1", b"400"),
        (b"CONNECT 127.0.0.1:99999 HTTP/1.1", b"400"),
        (b"nonsense", b"400"),
        (b"\xff\xfe", b"400"),
        (b"GET http://elsewhere.test/ HTTP/1.1", b"403"),
        (b"CONNECT 10.0.0.1:443 HTTP/1.1", b"403"),
        (b"CONNECT 127.0.0.1:1 HTTP/1.1", b"502"),
        (b"GET http://" + b"a" * 70_000 + b"/ HTTP/1.1", b"431"),
    ],
)
async def test_what_the_proxy_refuses(line: bytes, status: bytes) -> None:
    assert (await proxied(Allowlist(["127.0.0.1"]), line)).split(b" ")[1] == status


# Claims


ROOM = Capacity(2.0, 1000)


def claim(journal: Journal, name: str, owner: str = "o", cpus: float = 1.0, memory_mb: int = 100) -> Claim:
    return Claim(f"x-{owner}-{name}", "x", owner, str(journal.boxes / f"x-{owner}-{name}"), cpus, memory_mb)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "state")
    journal.prepare()
    return journal


def test_claims_are_the_room_that_is_taken(journal: Journal) -> None:
    one, two, three = (claim(journal, n) for n in "123")
    assert journal.reserve(one, ROOM)
    assert journal.reserve(two, ROOM)
    assert not journal.reserve(three, ROOM)
    assert journal.all() == [one, two]
    journal.clear(one)
    assert journal.reserve(three, ROOM)
    assert not journal.reserve(claim(journal, "4", cpus=0.0, memory_mb=801), ROOM)


def test_a_write_that_was_killed_takes_no_room(journal: Journal, tmp_path: Path) -> None:
    """Between its last byte and its rename."""
    one, two = claim(journal, "1", memory_mb=800), claim(journal, "2", memory_mb=800)
    assert journal.reserve(one, ROOM)
    claims = tmp_path / "state" / "claims"
    (claims / one.name).rename(claims / f".{one.name}")
    assert journal.all() == [] and journal.reserve(two, ROOM)
    journal.lost()
    assert [path.name for path in claims.iterdir()] == [two.name]


def test_only_dead_owners_are_reaped(journal: Journal) -> None:
    held = journal.hold_owner("living")
    os.close(journal.hold_owner("dead"))
    living, dead = claim(journal, "1", "living"), claim(journal, "1", "dead")
    for one in (living, dead):
        journal.write(one)
        Path(one.box, "deep").mkdir(parents=True)
    for one in journal.lost():
        journal.clear(one)
    assert journal.all() == [living]
    assert [p.name for p in journal.boxes.iterdir()] == ["x-living-1"]
    os.close(held)


def test_directories_without_a_readable_claim_are_reaped(journal: Journal) -> None:
    (journal.boxes / "x-gone-7").mkdir()
    cut = claim(journal, "8", "gone")
    Path(cut.box).mkdir()
    (journal.state / "claims" / cut.name).write_bytes(b'{"na')  # as a power cut leaves it
    for one in journal.lost():
        journal.clear(one)
    assert list(journal.boxes.iterdir()) == []
    assert list((journal.state / "claims").iterdir()) == []


@pytest.mark.parametrize(("durable", "synced"), [(True, 2), (False, 0)])
def test_a_durable_claim_is_on_the_disk_with_its_name(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, durable: bool, synced: int
) -> None:
    synced_fds: list[int] = []
    monkeypatch.setattr(os, "fsync", synced_fds.append)
    assert journal.reserve(claim(journal, "1"), ROOM, durable=durable)
    assert len(synced_fds) == synced


def test_what_cannot_be_removed_keeps_its_claim(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    one = claim(journal, "1", "gone")
    journal.write(one)
    monkeypatch.setattr("rollout_worker.sandboxes.claims._REMOVE_S", 0.05)

    def refuse(path: str) -> None:
        raise PermissionError(1, "not permitted", path)

    monkeypatch.setattr(trees, "remove", refuse)
    with pytest.raises(PermissionError):
        journal.clear(one)
    assert journal.all() == [one]


# Control groups


def version_two(root: Path, controllers: str) -> Path:
    own = root / "sys/fs/cgroup/box"
    own.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/box\n")
    for directory in (own, own.parent):
        (directory / "cgroup.controllers").write_text(controllers)
        (directory / "cgroup.subtree_control").write_text(controllers if directory == own else "")
    return own


def test_limits_of_version_two(tmp_path: Path) -> None:
    own = version_two(tmp_path, "cpu memory pids")
    for name in ("cpu", "memory", "pids"):
        assert cgroups._works(name, own, True)  # a directory stands for the kernel's
        shutil.rmtree(own / f"rollout-probe-{os.getpid()}")
    place = cgroups.Place({"cpu": own, "memory": own, "pids": own}, True)
    made = cgroups.make(place, "g", cpus=0.5, memory=1 << 30, pids=9)
    assert made == [own / "g"]
    found = {p.name: p.read_text() for p in (own / "g").iterdir()}
    assert found == {
        "cpu.max": "50000 100000",
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "pids.max": "9",
    }


def test_a_group_that_gives_no_controllers_is_no_place(tmp_path: Path) -> None:
    version_two(tmp_path, "hugetlb")
    assert cgroups.find(tmp_path).directories == {}


def test_memory_kills_are_counted(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert cgroups.memory_kills(cgroups.memory_events([tmp_path / "none", tmp_path])) == 2
    assert cgroups.memory_kills(cgroups.memory_events([tmp_path / "none"])) == 0


# Providers


async def test_a_missing_bubblewrap_is_told(tmp_path: Path) -> None:
    async with open_bubblewrap(tmp_path / "state", program="/no/such/bwrap") as provider:
        with pytest.raises(SandboxRefusedError, match="/no/such/bwrap"):
            await provider.probe()


async def test_a_bubblewrap_that_does_not_work_is_told_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    program.chmod(0o755)
    async with open_bubblewrap(tmp_path / "state", program=str(program)) as provider:
        with pytest.raises(SandboxRefusedError, match="No permissions to create new namespace"):
            await provider.create(Spec())
    assert list((tmp_path / "state" / "claims").iterdir()) == []


async def test_a_place_that_cannot_hold_sandboxes_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxCreateError, match=r"file/state .*Not a directory"):
        await open_process(tmp_path / "file" / "state").open()


async def test_other_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "darwin")
        with pytest.raises(SandboxRefusedError, match="darwin"):
            await open_process(tmp_path / "state").open()


async def bubblewrap_or_skip(provider: LocalProvider) -> None:
    try:
        await provider.probe()
    except SandboxRefusedError as error:
        pytest.skip(str(error))


def small_root(root: Path) -> Path:
    """A root file system with a shell and what it needs."""
    for program in ("sh", "cat"):
        found = shutil.which(program)
        assert found
        libraries = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
        for source in [found, *re.findall(r"(/\S+) \(", libraries)]:
            target = root / ("bin/" + program if source == found else source[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    (root / "app").mkdir()
    (root / "app" / "shipped").write_text("in the image")
    (root / "root").mkdir()
    return root


async def test_a_root_of_its_own(tmp_path: Path) -> None:
    async with open_bubblewrap(tmp_path / "state, of: ü") as provider:  # overlays' options have commas and colons
        await bubblewrap_or_skip(provider)
        if not (await provider.probe()).writable_root:
            pytest.skip("there are no overlay mounts")
        root = small_root(tmp_path / "image")
        async with await provider.create(Spec(root=RootFs(root), directories=("/app", "/logs"))) as sandbox:
            found = await sandbox.exec("cat /app/shipped; echo x > /app/new; echo y > /logs/z; echo /*")
            assert found.check().stdout.text() == "in the image/app /bin /dev /lib /lib64 /logs /proc /root\n".replace(
                "/lib /lib64", " ".join(sorted(f"/{p.name}" for p in root.iterdir() if p.name.startswith("lib")))
            )
        assert sorted(p.name for p in (root / "app").iterdir()) == ["shipped"]
        with pytest.raises(SandboxRefusedError, match="/bin/sh"):
            await provider.create(Spec(root=RootFs(tmp_path)))


OPEN = Network("host")


async def test_names_are_told_of_directories_only(tmp_path: Path) -> None:
    async with open_process(tmp_path) as provider, await provider.create(Spec(network=OPEN)) as sandbox:
        await sandbox.exec("mkdir empty full; mkfifo full/pipe; ln -s nowhere full/link; touch file")
        found = await sandbox.names("empty", "full", "file", "missing")
    assert {path: sorted(names) for path, names in found.items()} == {"empty": [], "full": ["link", "pipe"]}


async def test_sandboxes_wait_for_room_in_order(tmp_path: Path) -> None:
    async with open_process(tmp_path / "s", namespaces=False, capacity=Capacity(2.0, 4096)) as provider:
        spec = Spec(network=OPEN, limits=Limits(cpus=1.0, memory_mb=100))
        first, second = [await provider.create(spec) for _ in range(2)]
        order: list[str] = []

        async def make(name: str, cpus: float):
            sandbox = await provider.create(Spec(network=OPEN, limits=Limits(cpus=cpus, memory_mb=100)))
            order.append(name)
            return sandbox

        large = asyncio.ensure_future(make("large", 2.0))
        await asyncio.sleep(0)
        small = asyncio.ensure_future(make("small", 0.5))
        with pytest.raises(SandboxNoRoomError):
            await provider.create(spec, wait=False)
        await first.destroy()
        await asyncio.sleep(0.3)
        assert order == []  # the small one would fit, but the large one was first
        await second.destroy()
        await (await large).destroy()
        await (await small).destroy()
        assert order == ["large", "small"]


async def test_owners_share_the_room_of_a_host(tmp_path: Path) -> None:
    room = Capacity(1.0, 4096)
    spec = Spec(network=OPEN, limits=Limits(cpus=1.0, memory_mb=100))
    async with (
        open_process(tmp_path / "s", namespaces=False, capacity=room) as one,
        open_process(tmp_path / "s", namespaces=False, capacity=room) as two,
    ):
        await two.probe()
        sandbox = await one.create(spec)
        waiting = asyncio.ensure_future(two.create(spec))
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
        await sandbox.destroy()
        await (await asyncio.wait_for(waiting, 20)).destroy()


async def test_cancelled_creation_leaves_nothing(tmp_path: Path) -> None:
    async with open_process(tmp_path / "s", namespaces=False) as provider:
        await provider.probe()
        for delay in (0.0, 0.001, 0.003, 0.006, 0.012):
            making = asyncio.ensure_future(provider.create(Spec(network=OPEN)))
            await asyncio.sleep(delay)
            making.cancel()
            with suppress(asyncio.CancelledError):
                await (await making).destroy()
        assert list((tmp_path / "s" / "claims").iterdir()) == []
        assert list((tmp_path / "s" / "boxes").iterdir()) == []


async def test_kills_at_once_do_not_end_each_other(tmp_path: Path) -> None:
    """As that of a caller and that of a limit that is watched."""
    async with open_process(tmp_path / "s") as provider, await provider.create(Spec(network=Network("host"))) as box:
        for _ in range(10):
            await box.exec("(setsid sleep 100 > /dev/null 2>&1 &)")
            await asyncio.gather(*(box.kill() for _ in range(4)))


async def test_cost_counts_until_it_is_destroyed(tmp_path: Path) -> None:
    price = Price(cpu_hour=3600.0, gib_hour=7200.0)
    async with open_process(tmp_path / "s", namespaces=False, price=price) as provider:
        begun = time.monotonic()
        sandbox = await provider.create(Spec(network=OPEN, limits=Limits(cpus=0.5, memory_mb=512)))
        await asyncio.sleep(0.05)
        await sandbox.destroy()
        cost = sandbox.cost()
        # 1,800 + 3,600 dollars an hour
        assert 0 < cost <= (time.monotonic() - begun) * 1.5
        await asyncio.sleep(0.02)
        assert sandbox.cost() == cost


async def test_a_keeper_that_is_killed_is_known_to_be_gone_before_its_end_is_told(journal: Journal) -> None:
    zygote = Zygote(journal.state, "o")
    await zygote.start()
    assert zygote.alive
    os.kill(zygote.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while zygote.alive and time.monotonic() < until:
        time.sleep(0.01)  # noqa: ASYNC251 - the loop is not to hear of its end
    assert not zygote.alive
    await zygote.stop()


async def test_after_its_keeper_died_sandboxes_are_gone_and_new_ones_are_made(tmp_path: Path) -> None:
    async with open_process(tmp_path / "s", namespaces=False) as provider:
        sandbox = await provider.create(Spec(network=OPEN))
        os.kill(provider.keeper_pid, 9)
        with pytest.raises(SandboxGoneError):
            await sandbox.exec("sleep 100")
        async with await provider.create(Spec(network=OPEN)) as another:
            assert (await another.exec("exit 4")).exit_code == 4
        await sandbox.destroy()
    assert list((tmp_path / "s" / "claims").iterdir()) == []


async def test_the_suite_finds_a_provider_that_lets_links_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "stays_inside", lambda link, depth: True)
    async with open_process(tmp_path / "s", namespaces=False) as provider:
        bench = local_bench(provider, tmp_path / "scratch")
        outcomes = await run(bench, frozenset({"downloads_stay_in_their_target", "exit_code_zero"}))
        await bench.forget()
    assert {o.name: o.outcome for o in outcomes} == {
        "exit_code_zero": "passed",
        "downloads_stay_in_their_target": "failed",
    }


def test_files_are_served_whatever_the_numbers_of_their_descriptors(tmp_path: Path) -> None:
    """Those of the data and of the result may lie just where the other is to go."""
    (tmp_path / "one").write_text("told")
    request = json.dumps({"what": "read", "path": str(tmp_path / "one"), "user": None, "max_bytes": 9})
    script = f"""
import os
from rollout_worker.sandboxes import sandbox_init
request, data, result = os.pipe(), os.pipe(), os.pipe()
os.write(request[1], {request!r}.encode()), os.close(request[1])
os.dup2(data[1], 11), os.dup2(result[1], 10), os.close(data[1]), os.close(result[1])
if os.fork() == 0:
    sandbox_init._serve_files([request[0], 11, 10])
os.close(10), os.close(11)
print(os.read(data[0], 99), os.read(result[0], 99))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "b'told' b'{}'\n"


def test_providers_by_name(tmp_path: Path) -> None:
    assert {name: open_provider(name, tmp_path).name for name in ("process", "bubblewrap")} == {
        "process": "process",
        "bubblewrap": "bubblewrap",
    }
    with pytest.raises(ConfigError, match=r'environment.type: .*"bubblewarp"; .*"bubblewrap"'):
        open_provider("bubblewarp", tmp_path, key="environment.type")
    with pytest.raises(ConfigError, match=r"provider_config\.memory: .*image"):
        open_provider("process", tmp_path, {"memory": 1})


def test_a_provider_of_a_module(tmp_path: Path) -> None:
    assert open_provider("rollout_worker.sandboxes.process:open_process", tmp_path).name == "process"
    for name in ("no.such:Thing", "os:no_such", "os:"):
        with pytest.raises(ConfigError, match=f"environment.type: {name} "):
            open_provider(name, tmp_path, key="environment.type")


# The root under bubblewrap


@pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
def test_a_child_of_bubblewrap_that_ends_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its /proc entry is refused, then gone."""
    ends, real = [PermissionError, FileNotFoundError], os.open

    def opened(path: str, flags: int) -> int:
        if ends:
            raise ends.pop(0)
        return real("/dev/null", flags)

    with subprocess.Popen(["sleep", "60"]) as child, monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        found = roots.open_mounts(os.getpid())
        child.kill()
    os.close(found)
    assert not ends
