"""`rollout plan`: validate everything, touch nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.options import JsonOption
from rollout.cli.plan_files import check_coordinator, check_worker, kind_of
from rollout.cli.workloads import WORKLOADS


def plan(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="A coordinator's, worker's or workload's configuration.")
    ],
    json: JsonOption = False,
) -> None:
    """Say what a configuration file would do, after checking all of it: keys, values, contradictions, input rows.

    Nothing is written and nothing is connected to. --json: `{"kind": ..., "ok": true, "plan": [...]}`.
    """
    kind = kind_of(config)
    if kind == "coordinator":
        lines = check_coordinator(config)
    elif kind == "worker":
        lines = check_worker(config)
    else:
        lines = next(workload for workload in WORKLOADS if workload.name == kind).checker()(config)
    if json:
        from rollout.cli.show import print_json

        print_json({"kind": kind, "ok": True, "plan": lines})
        return
    typer.echo(f"{config}: a valid {kind} configuration")
    for line in lines:
        typer.echo(f"  {line}")
