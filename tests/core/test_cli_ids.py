"""Ids in tables: short where a person reads, whole where a program does."""

from __future__ import annotations

import sys

import pytest
from rollout.cli.references import means
from rollout.cli.show import seen

RUN = "01M8DRKDWQHJH10XCQ7C0EKZ52"


@pytest.mark.parametrize(("terminal", "shown"), [(True, "7C0EKZ52"), (False, RUN)])
def test_an_id_in_a_table(monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: str) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert seen(RUN) == shown


def test_what_stands_for_an_id() -> None:
    assert all(means(RUN, text) for text in ("01M8", "01m8drkd", "7C0E", "7c0ekz52", "0", RUN))
    assert not any(means(RUN, text) for text in ("KZ52", "C0EK", "01M9", f"{RUN}X"))
