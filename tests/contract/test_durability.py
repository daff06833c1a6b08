"""What was acknowledged survives a power loss: what is synced when, and what a new tenure may believe."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from objects_rig import Rig
from rollout.model.errors import FencedError, InputError, ProtocolError
from rollout.objects import fs
from rollout.objects.digest import object_id
from rollout.objects.fs import FsObjectStore
from rollout.wire.v1 import objects_pb2 as pb
from rollout_coordinator.leadership import Leadership
from rollout_coordinator.ledger import Fence
from rollout_coordinator.lifecycle import Coordinator
from rollout_coordinator.objects_gate import ObjectsGate
from rollout_coordinator.objects_service import ObjectsService
from test_objects import pieces

COUNTING = """
#define _GNU_SOURCE
#include <dlfcn.h>
static int count;
int synced(void) { return count; }
int fsync(int fd) { count++; return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { count++; return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""

COMMITS = """
import asyncio, ctypes, sys
from rollout_coordinator.core.step import Writes
from rollout_coordinator.ledger import Fence, LeaseRow
from rollout_coordinator.ledger.sqlite import SqliteLedger

synced = ctypes.CDLL(None).synced

async def main() -> None:
    ledger = SqliteLedger(sys.argv[1])
    await ledger.open()
    await ledger.insert_lease(LeaseRow("a", 0, 0, 0, False, ""))
    for batch in range(3):
        before = synced()
        await ledger.commit(Fence(0, batch), Writes())
        print(synced() - before)
    await ledger.close()

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts system calls through LD_PRELOAD")
def test_a_commit_returns_after_its_fsync(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to count system calls with")
    (tmp_path / "count.c").write_text(COUNTING)
    library = tmp_path / "count.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "count.c", "-ldl"], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", COMMITS, tmp_path / "ledger.db"],
        env=os.environ | {"LD_PRELOAD": str(library)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    counts = [int(line) for line in ran.stdout.split()]
    assert len(counts) == 3 and min(counts) >= 1


async def test_an_object_is_synced_before_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    sync, replace = os.fsync, Path.replace

    def synced(fd: int) -> None:
        done.append(("sync", str(Path(f"/dev/fd/{fd}").resolve())))
        sync(fd)

    def replaced(self: Path, target: Path) -> Path:
        done.append(("rename", str(self)))
        done.append(("shows", str(target)))
        return replace(self, target)

    store = FsObjectStore(tmp_path, reserve_bytes=0)
    await store.open()
    monkeypatch.setattr(fs.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    name = object_id(b"data")
    assert await store.put(name, pieces(b"data"), 4)
    path = str(store.path_of(name))
    shows = done.index(("shows", path))
    (kind, temporary) = done[shows - 1]
    assert kind == "rename" and ("sync", temporary) in done[:shows], "its bytes are on disk before it has its name"
    assert ("sync", str(Path(path).parent)) in done[shows:], "and its name before it is acknowledged"
    await store.close()


async def test_an_object_of_the_wrong_length_is_not_taken_for_stored(tmp_path: Path) -> None:
    store = FsObjectStore(tmp_path, reserve_bytes=0)
    await store.open()
    name = object_id(b"whole")
    await store.put(name, pieces(b"whole"), 5)
    store.path_of(name).write_bytes(b"who")  # cut short by a disk that lied
    assert await store.put(name, pieces(b"whole"), 5) is True
    assert store.path_of(name).read_bytes() == b"whole"
    await store.close()


async def test_what_a_client_is_told_to_be_there_is_kept_for_it(rig: Rig) -> None:
    first, second = rig.client(pin="run-1"), rig.client(pin="run-2")
    name = await first.put(b"x")
    assert await second.has([name]) == [True]
    await rig.store.unpin("run-1")
    assert await rig.store.pinned([name]) == {name}
    await first.close()
    await second.close()


async def test_a_new_tenure_believes_in_no_object_it_has_seen(tmp_path: Path) -> None:
    store = FsObjectStore(tmp_path, reserve_bytes=0)
    await store.open()
    gate = ObjectsGate(store)
    name = object_id(b"x")
    await store.put(name, pieces(b"x"), 1)
    assert await gate.missing([name]) == set()
    await store.delete(name)  # by the leader in between

    async def acquire() -> Fence:
        return Fence(7, 0)

    coordinator: Any = object.__new__(Coordinator)
    coordinator._parts = SimpleNamespace(
        leadership=Leadership(), objects_gate=gate, objects_child=SimpleNamespace(set_epoch=lambda epoch: None),
        metrics=SimpleNamespace(epoch=SimpleNamespace(set=lambda epoch: None)),
    )  # fmt: skip
    coordinator._lease = SimpleNamespace(acquire=acquire, leader_hint=lambda: "", before=None)
    coordinator._stop = asyncio.Event()
    coordinator._hint_every_s = 0.05
    coordinator._disk_fault = asyncio.get_running_loop().create_future()
    coordinator.addr = coordinator.join_addr = ""
    coordinator.probes = SimpleNamespace(addr="")
    assert await coordinator._win()
    assert await gate.missing([name]) == {name}
    await store.close()


async def test_items_that_refer_to_what_is_not_stored_are_refused(tmp_path: Path) -> None:
    store = FsObjectStore(tmp_path, reserve_bytes=0)
    await store.open()
    gate = ObjectsGate(store)
    name = object_id(b"x")
    with pytest.raises(InputError, match="upload objects before"):
        await gate.check_payloads({name})
    await store.put(name, pieces(b"x"), 1)
    await gate.check_payloads({name})
    await store.close()


def test_nothing_is_put_at_the_server_of_a_deposed_leader(tmp_path: Path) -> None:
    service = ObjectsService(FsObjectStore(tmp_path), 4)
    service._check_epoch(pb.HasRequest(epoch=4))
    with pytest.raises(FencedError):
        service._check_epoch(pb.HasRequest(epoch=5))
    with pytest.raises(ProtocolError):
        service._check_epoch(pb.HasRequest())
