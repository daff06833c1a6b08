"""The suite as a program; see the package. Exit codes: 0 all passed, 1 a case failed, 2 it could not start."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import ConfigError, RolloutError

from rollout_worker.sandboxes.conformance.running import PROVIDERS, Outcome, run
from rollout_worker.sandboxes.conformance.suite import CASES, Bench, engine_bench, local_bench
from rollout_worker.sandboxes.engine_provider import EngineProvider
from rollout_worker.sandboxes.local import LocalProvider
from rollout_worker.sandboxes.port import MIB, Provider
from rollout_worker.sandboxes.providers import open_provider


def find_provider(name: str, state: Path, config: str | None) -> Provider:
    """Return the named provider. Raises ConfigError, which lists the known ones."""
    if name in PROVIDERS and config is None:
        return PROVIDERS[name](state)
    try:
        settings = json.loads(config or "{}")
    except ValueError as error:
        raise ConfigError(f"--config: this is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError("--config: settings are an object, in braces")
    return open_provider(name, state, cast("dict[str, Any]", settings), key="provider")


def check_cases(names: list[str]) -> None:
    known = [case.name for case in CASES]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(f"--case: there is no case {name}" + (f"; did you mean {near[0]}?" if near else ""))


async def judge(arguments: argparse.Namespace) -> int:
    check_cases(arguments.case)
    state = Path(arguments.state)

    def tell(outcome: Outcome) -> None:
        if not arguments.json:
            sys.stdout.write(f"{outcome.outcome:15} {outcome.name} ({outcome.seconds:.2f} s)\n")
            if outcome.text:
                sys.stdout.write(f"    {outcome.text.strip()}\n")
            sys.stdout.flush()

    async with find_provider(arguments.provider, state / "state", arguments.config) as provider:
        await provider.probe()
        scratch, large = state / "scratch", arguments.large_mb * MIB
        if isinstance(provider, LocalProvider):
            bench = local_bench(provider, scratch, large=large)
        elif isinstance(provider, EngineProvider):
            bench = engine_bench(provider, scratch, large=large)
        else:
            bench = Bench(provider, scratch, address=None, large=large)
        outcomes = await run(bench, frozenset(arguments.case), tell)
        await bench.forget()
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")
    return int(any(outcome.outcome == "failed" for outcome in outcomes))


def main() -> None:
    program = "python -m rollout_worker.sandboxes.conformance"
    parser = argparse.ArgumentParser(prog=program, description="Run the suite over a provider of sandboxes.")
    known = ", ".join(PROVIDERS)
    parser.add_argument(
        "provider", help=f"{known}, another registered name, or module:Class of a directory and settings"
    )
    parser.add_argument("--config", help="the provider's own settings, as JSON")
    parser.add_argument("--state", required=True, help="a directory for sandboxes and what the cases need")
    parser.add_argument("--case", action="append", default=[], help="only this case; may be given again")
    parser.add_argument("--large-mb", type=int, default=200, help="the largest output")
    parser.add_argument("--json", action="store_true", help="outcomes as one line of JSON")
    try:
        code = asyncio.run(judge(parser.parse_args()))
    except RolloutError as error:
        sys.stderr.write(f"error [{error.code}]: {error}\n")
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
