"""Outcomes of the checks, for people and for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.text import Text

from rollout.cli.cloud_doctor.check import NAMES, Outcome
from rollout.cli.show import console

_WIDTH = max(map(len, NAMES))


def as_json(outcomes: Sequence[Outcome], total_ms: int) -> dict[str, Any]:
    checks: list[dict[str, Any]] = []
    for one in outcomes:
        entry: dict[str, Any] = {
            "name": one.name,
            "status": "pass" if one.ok else "fail",
            "latency_ms": one.latency_ms,
        }
        checks.append(entry if one.ok else entry | {"error": one.error})
    passed = sum(one.ok for one in outcomes)
    summary = {"pass_count": passed, "fail_count": len(outcomes) - passed, "total_latency_ms": total_ms}
    return {"checks": checks, "summary": summary}


def show(outcome: Outcome) -> None:
    what, _, remedy = outcome.error.partition("; ")
    line = f" {outcome.name:<{_WIDTH}} {outcome.latency_ms:>6} ms  {outcome.detail or what}".rstrip()
    console().print(Text.assemble((_mark(outcome.ok), "green" if outcome.ok else "red"), line), soft_wrap=True)
    for line in filter(None, (remedy, *outcome.advice)):
        typer.echo(f"{'':<{_WIDTH + 13}}-> {line}")


def show_summary(outcomes: Sequence[Outcome], total_ms: int) -> None:
    passed = sum(one.ok for one in outcomes)
    typer.echo(f"{passed} pass, {len(outcomes) - passed} fail {_dash()} total {total_ms} ms")


def _mark(ok: bool) -> str:
    return ("✔" if ok else "✖") if _unicode() else ("ok" if ok else "FAIL")


def _dash() -> str:
    return "—" if _unicode() else "-"


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
