"""Fixtures of every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import postgres_server, postgres_server_url, postgres_url
from rollout.config.settings import EmbeddedStorage, PostgresStorage, StorageSection

__all__ = ["postgres_server", "postgres_server_url", "postgres_url", "short_dir", "storage_section"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The soak first: it takes an hour of little work, and the other long tests run beside it. Short ones next: the
    test after it is not stolen (`worksteal` leaves each worker two), so it waits for the hour to end."""
    order = {"test_soak.py": 0, "test_fuzz_long.py": 1}
    items.sort(key=lambda item: order.get(item.path.name, 2))


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
