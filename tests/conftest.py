"""Fixtures of every test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster
import prefork
import pytest
from postgres import postgres_server, postgres_server_url, postgres_url
from rollout.config.settings import EmbeddedStorage, PostgresStorage, StorageSection
from rollout_worker.sandboxes.bubblewrap import installed_program

__all__ = ["postgres_server", "postgres_server_url", "postgres_url", "short_dir", "storage_section"]


cluster.popen = prefork.Popen

if shutil.which("bwrap") is None and (bwrap := installed_program()):
    os.environ["PATH"] += os.pathsep + str(Path(bwrap).parent)

LONGEST_FIRST = (
    "test_soak.py",
    "test_fuzz_long.py",
    "test_engine_faults.py",
    "acceptance",
    "integration",
    "contract",
    "plugins",
)
"""Files and directories, in the order in which the processes of pytest-xdist take them: none is left alone at the end.

The soak takes an hour of little work, and the other long tests run beside it; short ones come next, as the test after
it is not stolen (`worksteal` leaves each worker two) and waits for the hour to end.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        names = (item.path.name, item.path.parent.name)
        return next((n for n, name in enumerate(LONGEST_FIRST) if name in names), len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def no_contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither go to a cluster of whoever runs them, nor leave contexts behind, or runs for `@last`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("ROLLOUT_CONTEXT", raising=False)
        yield


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """Mounts a file system of its own of `kib` at a directory."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small tmpfs: a disk that is really full is the point of this test")
    mounted: list[Path] = []

    def make(directory: Path, kib: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        options = ["-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(directory)]
        done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a small tmpfs here ({done.stderr.strip()})")
        mounted.append(directory)

    yield make
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short path, for Unix sockets (their paths end at about 100 characters)."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture(params=["sqlite", "postgres"])
def storage_section(request: pytest.FixtureRequest, tmp_path: Path) -> StorageSection:
    """A fresh database, once of each kind."""
    if request.param == "sqlite":
        return StorageSection(embedded=EmbeddedStorage(path=str(tmp_path / "data" / "rollout.db")))
    url = request.getfixturevalue("postgres_url")
    return StorageSection(backend="postgres", postgres=PostgresStorage(url=url, direct_url=url, pool_size=4))
