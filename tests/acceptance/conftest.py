"""The CLI as a user runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance_cli import Cli, until


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    # Hidden: they change while a run goes on, and some tests send this directory as code.
    found = Cli(tmp_path, {"XDG_STATE_HOME": str(tmp_path / ".state"), "XDG_CONFIG_HOME": str(tmp_path / ".config")})
    yield found
    for process in found.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not found.left_behind(), "every process to end")
