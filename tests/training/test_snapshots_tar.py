"""The archive of a snapshot: the same bytes from the same files, and nothing but those bytes is ever unpacked."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from blake3 import blake3
from rollout.model.errors import InputError, ObjectCorruptError
from rollout.snapshots.parts import parts_of, read_manifest
from rollout.snapshots.tar import pack, unpack

FILES = {"manifest.json": b'{"format":1,"kind":"train_state"}', "model.safetensors": b"w" * 3000, "model/a.json": b"{}"}


def state(directory: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_the_bytes_depend_on_names_and_contents_alone(tmp_path: Path) -> None:
    one = state(tmp_path / "one")
    other = state(tmp_path / "other", dict(reversed(FILES.items())))
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    first, second = pack(one, tmp_path / "one.tar"), pack(other, tmp_path / "other.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "other.tar").read_bytes()
    assert first == second and first.id == blake3((tmp_path / "one.tar").read_bytes()).digest()
    assert first.size == (tmp_path / "one.tar").stat().st_size
    assert first.members == {name: blake3(data).hexdigest() for name, data in FILES.items()}
    unpack(tmp_path / "one.tar", tmp_path / "back", first.id)
    assert contents(tmp_path / "back") == FILES


@pytest.mark.parametrize("member", [*FILES, "header", "end"])
def test_one_flipped_bit_is_refused_and_nothing_is_left(tmp_path: Path, member: str) -> None:
    archive = tmp_path / "state.tar"
    packed = pack(state(tmp_path / "state"), archive)
    data = bytearray(archive.read_bytes())
    at = {"header": 10, "end": len(data) - 1}.get(member)
    if at is None:
        at = data.index(FILES[member]) + 1
    data[at] ^= 1
    archive.write_bytes(data)
    with pytest.raises(ObjectCorruptError, match="damaged"):
        unpack(archive, tmp_path / "back", packed.id)
    assert [path.name for path in tmp_path.iterdir() if "back" in path.name] == []


def entry(name: str, data: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


GOOD = entry("b")
FOREIGN = {
    "other order": [entry("c"), GOOD],
    "the same name twice": [GOOD, GOOD],
    "a path out of the directory": [entry("../evil")],
    "an absolute path": [entry("/tmp/evil")],
    "another spelling": [entry("./b")],
    "a link": [entry("b", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a time": [entry("b", mtime=5)],
    "an owner": [entry("b", uname="root")],
    "a mode": [entry("b", mode=0o755)],
}


@pytest.mark.parametrize("what", [*FOREIGN, "truncated", "more at the end", "no archive"])
def test_what_pack_does_not_write_is_refused_though_its_hash_is_right(tmp_path: Path, what: str) -> None:
    archive = tmp_path / "state.tar"
    with tarfile.open(archive, "w:", format=tarfile.GNU_FORMAT) as out:
        for info, data in FOREIGN.get(what, [GOOD]):
            out.addfile(info, io.BytesIO(data))
    whole = archive.read_bytes()
    changed = {"truncated": whole[:700], "more at the end": whole + bytes(512), "no archive": b"weights"}
    archive.write_bytes(changed.get(what, whole))
    with pytest.raises(ObjectCorruptError):
        unpack(archive, tmp_path / "back", blake3(archive.read_bytes()).digest())
    assert not (tmp_path / "back").exists() and not Path("/tmp/evil").exists()


def test_an_archive_is_there_only_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = state(tmp_path / "state")
    seen: list[bool] = []
    add = tarfile.TarFile.addfile

    def interrupted(self: tarfile.TarFile, info: tarfile.TarInfo, file: io.BytesIO | None = None) -> None:
        seen.append((tmp_path / "state.tar").exists())
        if info.name == "model.safetensors":
            raise OSError(28, "No space left on device")
        add(self, info, file)

    monkeypatch.setattr(tarfile.TarFile, "addfile", interrupted)
    with pytest.raises(OSError, match="No space"):
        pack(directory, tmp_path / "state.tar")
    assert seen and not any(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_link_is_no_part_of_a_snapshot(tmp_path: Path) -> None:
    (state(tmp_path / "state") / "link").symlink_to("manifest.json")
    with pytest.raises(InputError, match="neither a file nor a directory"):
        pack(tmp_path / "state", tmp_path / "state.tar")
    assert not (tmp_path / "state.tar").exists()


def test_parts_name_what_differs(tmp_path: Path) -> None:
    one = parts_of(pack(state(tmp_path / "one"), tmp_path / "a").members)
    other = parts_of(pack(state(tmp_path / "two", FILES | {"model.safetensors": b"v"}), tmp_path / "b").members)
    assert set(one) == {"weights", "manifest", "model"}
    assert {name for name in one if one[name] != other[name]} == {"weights"}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b'{"format":1,"kind":"buffer"}', "kind 'buffer'"),
        (b'{"format":2,"kind":"train_state"}', "format 2"),
        (b"{", "no snapshot"),
    ],
)
def test_other_kinds_and_newer_formats_are_refused(tmp_path: Path, manifest: bytes, message: str) -> None:
    with pytest.raises(ObjectCorruptError, match=message):
        read_manifest(state(tmp_path / "state", {"manifest.json": manifest}), "train_state")


MEASURE = """
import resource, sys
from pathlib import Path
from rollout.snapshots.tar import pack, unpack
root = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
packed = pack(root / "state", root / "state.tar")
unpack(root / "state.tar", root / "back", packed.id)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with (tmp_path / "state" / "model.safetensors").open("wb") as file:
        file.truncate(64 << 20)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    grown = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 16 << 20
