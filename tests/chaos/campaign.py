"""Real processes, random faults while rows run, an independent checker: `make chaos`.

    python tests/chaos/campaign.py [--faults 24] [--database sqlite|postgres|both|cloud] [--seed S] [--json] [--record]

A coordinator (on PostgreSQL a standby too; `cloud` is PostgreSQL with objects on S3 and rows from SQS, emulated), three workers, two people with batch after batch, and a run of exclusive
rows that never ends. Faults of every kind
strike in an order that the seed decides, each while work is in flight there; now and then the next one strikes before
the last is over. The seed decides kinds, targets and durations, not how the processes race. Ends with 1, and keeps
the directory, when anything was lost, doubled, out of order, stuck or claimed without being true.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cloud"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from results_page import write_section

from chaos import record
from chaos.clients import FLAVOURS, FROM_QUEUE, Client, Flavour
from chaos.exclusive import Exclusive
from chaos.faults import KINDS
from chaos.faults.fault import Scene
from chaos.report import Report
from chaos.strikes import STALL_S, Strikes
from chaos.verdict import judge
from chaos.watcher import Watcher
from chaos.world import World

WORKERS = 3


def mixes(database: str) -> tuple[tuple[Flavour, ...], ...]:
    """Of each client; in the cloud the second one takes its rows from queues."""
    in_order, some_fail, as_objects = FLAVOURS
    if database == "cloud":
        return (as_objects, some_fail), (FROM_QUEUE,)
    return (in_order, as_objects), (some_fail, in_order)


class Campaign:
    """One database, one cluster, one plan."""

    def __init__(self, database: str, faults: int, seed: int, root: Path, say: Any, minutes: float) -> None:
        self.report = Report(database, seed, directory=str(root))
        self.world = World(database, root, workers=WORKERS, dice=random.Random(seed + 1), say=say)
        self.clients = [
            Client(f"client-{n + 1}", self.world, list(flavours), random.Random(seed + 10 + n))
            for n, flavours in enumerate(mixes(database))
        ]
        self._exclusive = Exclusive(self.world)
        self.watcher = Watcher(self.world, self.clients)
        self._scene = Scene(self.world, self.watcher, self.clients)
        self._strikes = Strikes(self._scene, self.report, faults, minutes, say, self._check_background)
        self._say = say
        self._background: list[asyncio.Task[None]] = []

    async def run(self) -> Report:
        """Strikes, judges and stops; whatever fails on the way is an objection."""
        started = time.monotonic()
        try:
            await self.world.start()
            self._say(
                f"{self.report.database}: {WORKERS} workers, {len(self.clients)} clients, seed {self.report.seed}"
            )
            await self._exclusive.start()
            watching = asyncio.create_task(self.watcher.run())
            working = [asyncio.create_task(client.run()) for client in self.clients]
            self._background = [watching, *working]
            try:
                await self._strikes.run()
                await self._finish(working)
                await judge(self._scene, self.report, self._exclusive)
            finally:
                for task in self._background:
                    task.cancel()
                await self._strikes.close()
                await asyncio.gather(*self._background, return_exceptions=True)
        except Exception as error:  # noqa: BLE001 - kept as evidence: a campaign that breaks has proved nothing
            self.world.object_to("the campaign broke: " + "".join(traceback.format_exception(error)))
        finally:
            await self.world.close()
            self.report.objections = self.world.objections
            self.report.seconds = time.monotonic() - started
        return self.report

    def _check_background(self) -> None:
        """Raises what ended a watcher or a client before its time."""
        self._exclusive.check()
        for task in self._background:
            if task.done():
                task.result()
                raise RuntimeError("a client gave up")

    async def _finish(self, working: list[asyncio.Task[None]]) -> None:
        for client in self.clients:
            client.leaving = True
        _, late = await asyncio.wait(working, timeout=2 * STALL_S)
        await self._exclusive.finish(2 * STALL_S)
        if late:
            self.world.object_to(f"batches were not finished {2 * STALL_S:.0f} s after the last fault")


# ---- command line


async def run_all(args: argparse.Namespace, say: Any) -> list[Report]:
    databases = ["sqlite", "postgres"] if args.database == "both" else [args.database]
    base: Path = args.dir or Path(tempfile.mkdtemp(prefix="rollout-chaos-"))
    campaigns: list[Campaign] = []
    for database in databases:
        faults = args.faults or record.PER_KIND * len(KINDS[database])
        campaigns.append(Campaign(database, faults, args.seed, base / database, say, args.minutes))
    if args.together:
        # When cancelled, each must have tidied up before this returns.
        ended = await asyncio.gather(*(campaign.run() for campaign in campaigns), return_exceptions=True)
        return [campaign.report for campaign, _ in zip(campaigns, ended, strict=True)]
    return [await campaign.run() for campaign in campaigns]


async def main_task(args: argparse.Namespace, say: Any) -> list[Report]:
    # Starting, waiting for a log line and reading SQLite block a thread each: none may wait for another.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    task = asyncio.ensure_future(run_all(args, say))
    told: list[int] = []

    def stop(number: int) -> None:
        told.append(number)
        if len(told) == 1:  # another must not interrupt the tidying up
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return await task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=0, help=f"per database; default {record.PER_KIND} of each kind")
    parser.add_argument("--database", choices=("sqlite", "postgres", "both", "cloud"), default="both")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--minutes", type=float, default=120.0, help="no further fault after so long")
    parser.add_argument("--together", action="store_true", help="both databases at the same time")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    parser.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    parser.add_argument("--reports", type=Path, nargs="+", help="strike nothing: write that section from kept reports")
    parser.add_argument("--dir", type=Path, default=None, help="keep everything here, the reports too")
    args = parser.parse_args()
    args.seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed

    def say(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    if args.reports:
        write_page([json.loads(path.read_text()) for path in args.reports])
        return 0
    try:
        reports = asyncio.run(main_task(args, say))
    except asyncio.CancelledError:
        say("interrupted; nothing is left behind")
        return 130
    return conclude(args, reports, say)


def conclude(args: argparse.Namespace, reports: list[Report], say: Any) -> int:
    """Tables, objections, how to replay; the exit code."""
    bad = False
    for report in reports:
        say("\n" + record.table(asdict(report)))
        bad = bad or bool(report.objections)
        if args.dir is not None or report.objections:
            Path(report.directory, "report.json").write_text(json.dumps(asdict(report), indent=2))
        if report.objections:
            say(f"\n{report.database}: {len(report.objections)} objections:")
            for objection in report.objections:
                say(f"  {objection}")
            say(f"evidence: {report.directory}")
            faults = args.faults or record.PER_KIND * len(KINDS[report.database])
            say(f"again: make chaos CHAOS_ARGS='--database {report.database} --faults {faults} --seed {report.seed}'")
        elif args.dir is None:
            shutil.rmtree(report.directory, ignore_errors=True)
    if args.json:
        print(json.dumps([asdict(report) for report in reports]))
    if args.record:
        write_page([asdict(report) for report in reports])
    return 1 if bad else 0


def write_page(reports: list[dict[str, Any]]) -> None:
    """Into docs/benchmarks.md, objections included."""
    write_section("faults", record.section(reports))


if __name__ == "__main__":
    sys.exit(main())
