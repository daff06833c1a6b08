"""The suite as a program; see the package."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from pathlib import Path

from rollout_worker.sandboxes.conformance.running import PROVIDERS, Outcome, run
from rollout_worker.sandboxes.conformance.suite import (
    local_bench,
)
from rollout_worker.sandboxes.port import (
    MIB,
)


async def _main(arguments: argparse.Namespace) -> int:
    name: str = arguments.provider
    if name in PROVIDERS:
        factory = PROVIDERS[name]
    else:
        module, _, function = name.partition(":")
        factory = getattr(importlib.import_module(module), function)
    state = Path(arguments.state)

    def tell(outcome: Outcome) -> None:
        if not arguments.json:
            sys.stdout.write(f"{outcome.outcome:15} {outcome.name} ({outcome.seconds:.2f} s)\n")
            if outcome.text:
                sys.stdout.write(f"    {outcome.text.strip()}\n")
            sys.stdout.flush()

    async with factory(state / "state") as provider:
        bench = local_bench(provider, state / "scratch", large=arguments.large_mb * MIB)
        outcomes = await run(bench, frozenset(arguments.case), tell)
        await bench.forget()
    if arguments.json:
        sys.stdout.write(json.dumps([outcome.__dict__ for outcome in outcomes]) + "\n")
    return int(any(outcome.outcome == "failed" for outcome in outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="rollout_worker.sandboxes.conformance", description="Run the suite over a provider."
    )
    parser.add_argument("provider", help=f"{', '.join(PROVIDERS)}, or module:function of a directory")
    parser.add_argument("--state", required=True, help="a directory for sandboxes and what the cases need")
    parser.add_argument("--case", action="append", default=[], help="only this case; may be given again")
    parser.add_argument("--large-mb", type=int, default=200, help="the largest output")
    parser.add_argument("--json", action="store_true")
    sys.exit(asyncio.run(_main(parser.parse_args())))


if __name__ == "__main__":
    main()
