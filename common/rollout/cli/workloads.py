"""The workloads this program knows, a row each: its commands, its configuration, and how to tell its file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer

Check = Callable[[Path], list[str]]
"""Validates a configuration file and says, line by line, what it would do. Touches nothing."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`commands` and `check` are `module:attribute`, imported when wanted. `sections`: a file with these is its."""

    name: str
    help: str
    commands: str
    check: str
    sections: frozenset[str]

    def app(self) -> typer.Typer:
        return cast(typer.Typer, _load(self.commands))

    def checker(self) -> Check:
        return cast(Check, _load(self.check))


WORKLOADS = (
    Workload(
        "infer",
        "Batch inference over JSONL: resumable, every row exactly once, in input order.",
        "rollout.cli.infer:app",
        "rollout.cli.plan_files:check_infer",
        frozenset({"model", "input", "output", "sampling", "backend", "workers"}),
    ),
)


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
