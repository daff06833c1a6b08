"""Checks of `rollout doctor` that need no cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rollout.cli.doctor.cluster import cluster
from rollout.cli.doctor.finding import Check, Finding, examine, ok
from rollout.cli.doctor.machine import space_of, unmet
from rollout.client.target import Target
from rollout.model.errors import ConfigError


@pytest.mark.parametrize(
    ("installed", "wanted", "is_unmet"),
    [
        ("1.85.3", ">=1.76", False),
        ("1.75", ">=1.76", True),
        ("3.14.0", "<3.14,>=3.11", True),
        ("3.13.9", "<3.14,>=3.11", False),
        ("6.31.1rc1", ">=6.31.1", False),
        ("25", ">=25.1", True),
        ("0.20", "", False),
    ],
)
def test_versions_are_compared_as_numbers(installed: str, wanted: str, is_unmet: bool) -> None:
    assert unmet(installed, wanted) is is_unmet


@pytest.mark.parametrize(("free", "level"), [(1 << 20, "fault"), (1 << 29, "warning"), (1 << 36, "ok")])
def test_space(free: int, level: str) -> None:
    assert space_of("disk", "/data", free, 1 << 40).level == level


async def test_a_private_cluster_that_nobody_runs_is_no_fault() -> None:
    target = Target([], Path("out/.rollout/tls"), "rollout", False, "--dir", private=Path("out/.rollout"))
    (found,) = await cluster(target, "1")
    assert (found.level, found.text.partition(": ")[2]) == (
        "ok", "no command works there at present, so there is no coordinator to ask"
    )  # fmt: skip


async def test_checks_run_at_once_in_order_and_none_can_hold_up_the_rest() -> None:
    together = asyncio.Barrier(2)

    async def meets() -> list[Finding]:
        await together.wait()
        return [ok("met", "")]

    async def hangs() -> list[Finding]:
        await asyncio.Event().wait()
        return []

    async def fails() -> list[Finding]:
        raise ConfigError("the key may be read by everybody")

    checks = [Check("hangs", hangs, limit_s=0.05), Check("a", meets), Check("b", meets), Check("fails", fails)]
    found = await examine(checks, lambda text: None)
    assert [(finding.name, finding.level) for finding in found] == [
        ("hangs", "warning"),
        ("met", "ok"),
        ("met", "ok"),
        ("fails", "fault"),
    ]
    assert found[-1].text == "the key may be read by everybody"
