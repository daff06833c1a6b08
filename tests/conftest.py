"""Fixtures of every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres import postgres_server, postgres_server_url, postgres_url

__all__ = ["postgres_server", "postgres_server_url", "postgres_url", "short_dir"]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short path, for Unix sockets (their paths end at about 100 characters)."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
