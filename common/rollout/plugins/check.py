"""`python -m rollout.plugins.check MANIFEST`: exit 0 if the plugin passes, 1 if not, 2 on wrong usage."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys

import structlog
from rich.console import Console
from rich.table import Table

from rollout.model.errors import ConfigError
from rollout.plugins.suite import Check, Host, check_plugin


def plugin_host() -> Host:
    """Return the worker's plugin host. It is found by name, because this package must not import the worker's."""
    try:
        hosting = importlib.import_module("rollout_worker.hosting.host")
    except ImportError as e:
        raise ConfigError("checking a plugin needs the worker's package: pip install rollout-engine") from e
    return hosting.PluginHost()


def show(checks: list[Check], console: Console) -> None:
    table = Table("check", "", "detail")
    for check in checks:
        table.add_row(check.name, "[green]ok[/]" if check.passed else "[red]failed[/]", check.detail)
    console.print(table)
    failed = sum(not c.passed for c in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        Console(stderr=True).print("usage: python -m rollout.plugins.check MANIFEST")
        return 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

    async def run() -> list[Check]:
        return await check_plugin(arguments[0], plugin_host())

    checks = asyncio.run(run())
    show(checks, Console())
    return 0 if all(c.passed for c in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
