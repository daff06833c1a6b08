"""Real processes, random faults while rows run, an independent checker: `make chaos`.

    python tests/chaos/campaign.py [--faults 24] [--database sqlite|postgres|both] [--seed S] [--json] [--record]

A coordinator (on PostgreSQL a standby too), three workers and two people with batch after batch. Faults of every kind
strike in an order that the seed decides, each while work is in flight there; now and then the next one strikes before
the last is over. The seed decides kinds, targets and durations, not how the processes race. Ends with 1, and keeps
the directory, when anything was lost, doubled, out of order, stuck or claimed without being true.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "smoke"))

from chaos import record
from chaos.checker import Expected, Window, check_audit, check_files, check_ledger, load, unexplained
from chaos.clients import FLAVOURS, POISON, Client
from chaos.faults import KINDS, Aim, Fault, Scene
from chaos.ledger_reader import AwayError, snapshot, without_result
from chaos.watcher import Watcher
from chaos.world import TTL_S, World

WORKERS = 3
OVERLAP = 0.2
AIM_S = 45.0
STALL_S = 60.0
FAILURE_GRACE_S = TTL_S + 3.0
REPEATS = 10


@dataclass
class Struck:
    """One fault, and what came of it. Seconds; `at` is Unix time."""

    number: int
    kind: str
    target: str = ""
    in_flight: int = 0
    effect: str = ""
    at: float = 0.0
    held_s: float = 0.0
    first_commit_s: float = 0.0
    settled_s: float = 0.0
    overlaps: bool = False
    counted: bool = False
    blames: str | None = None


@dataclass
class Report:
    """What a campaign on one database found."""

    database: str
    seed: int
    seconds: float = 0.0
    faults: list[Struck] = field(default_factory=list[Struck])
    totals: dict[str, Any] = field(default_factory=dict[str, Any])
    objections: list[str] = field(default_factory=list[str])
    directory: str = ""


def plan(kinds: list[str], faults: int, seed: int) -> list[tuple[str, bool]]:
    """(kind, whether it strikes before the last one is over): round after round of every kind, in random order."""
    dice = random.Random(seed)
    drawn: list[str] = []
    while len(drawn) < faults:
        drawn += dice.sample(kinds, len(kinds))
    return [(kind, n > 0 and dice.random() < OVERLAP) for n, kind in enumerate(drawn[:faults])]


class Campaign:
    """One database, one cluster, one plan."""

    def __init__(self, database: str, faults: int, seed: int, root: Path, say: Any, minutes: float) -> None:
        self.report = Report(database, seed, directory=str(root))
        self.world = World(database, root, workers=WORKERS, dice=random.Random(seed + 1), say=say)
        self.clients = [
            Client(f"client-{n + 1}", self.world, list(flavours), random.Random(seed + 10 + n))
            for n, flavours in enumerate(((FLAVOURS[0], FLAVOURS[2]), (FLAVOURS[1], FLAVOURS[0])))
        ]
        self.watcher = Watcher(self.world, self.clients)
        self._scene = Scene(self.world, self.watcher, self.clients)
        self._plan = plan(list(KINDS[database]), faults, seed)
        self._faults = faults
        self._seed = seed
        self._minutes = minutes
        self._say = say
        self._going: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._again: list[str] = []
        self._repeats: Counter[str] = Counter()

    async def run(self) -> Report:
        """Strikes, judges and stops; whatever fails on the way is an objection."""
        started = time.monotonic()
        try:
            await self.world.start()
            self._say(f"{self.report.database}: {WORKERS} workers, {len(self.clients)} clients, seed {self._seed}")
            watching = asyncio.create_task(self.watcher.run())
            working = [asyncio.create_task(client.run()) for client in self.clients]
            self._background = [watching, *working]
            try:
                await self._strike_all()
                await self._finish(working)
                await self._judge()
            finally:
                for task in (*self._background, *self._going):
                    task.cancel()
                await asyncio.gather(*self._background, *self._going, return_exceptions=True)
        except Exception as error:  # noqa: BLE001 - kept as evidence: a campaign that breaks has proved nothing
            self.world.object_to("the campaign broke: " + "".join(traceback.format_exception(error)))
        finally:
            await self.world.close()
            self.report.objections = self.world.objections
            self.report.seconds = time.monotonic() - started
        return self.report

    def _check_background(self) -> None:
        """Raises what ended a watcher or a client before its time."""
        for task in self._background:
            if task.done():
                task.result()
                raise RuntimeError("a client gave up")

    # ---- striking

    async def _strike_all(self) -> None:
        waiting = deque(self._plan)
        number = 0
        until = time.monotonic() + 60 * self._minutes
        while time.monotonic() < until:
            if not waiting:
                await self._quiet()
                waiting.extend((kind, False) for kind in self._again)
                self._again.clear()
            if not waiting:
                break
            self._check_background()
            kind, overlaps = waiting.popleft()
            number += 1
            await self._strike(number, kind, overlaps)
            if not overlaps and not (waiting and waiting[0][1]):
                await self._quiet()
        await self._quiet()

    async def _strike(self, number: int, kind: str, overlaps: bool) -> None:
        """Returns once it struck; what holds, heals and measures goes on in `_going`."""
        dice = random.Random(f"{self._seed}/{number}")
        if overlaps and self._going:
            await asyncio.sleep(dice.uniform(0.2, 1.0))
        else:
            await self._quiet()
        fault = KINDS[self.report.database][kind](self._scene, dice)
        aim = await self._aim(fault)
        if aim is None:
            self._say(f"{self.report.database}: {kind}: nothing in flight to strike")
            self._repeat(kind)
            return
        hit = asyncio.Event()
        struck = Struck(number, kind, overlaps=bool(self._going))
        task = asyncio.create_task(self._carry_out(fault, aim, struck, hit))
        self._going.add(task)
        task.add_done_callback(self._done)
        await hit.wait()

    def _repeat(self, kind: str) -> None:
        """One that did not count is tried again, not for ever."""
        self._repeats[kind] += 1
        if self._repeats[kind] <= REPEATS:
            self._again.append(kind)
        else:
            self.world.object_to(f"{kind}: {REPEATS} tries did not count")

    def _done(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.object_to(f"a fault of the campaign itself: {error!r}")

    async def _quiet(self) -> None:
        while self._going:
            await asyncio.wait(self._going)

    async def _aim(self, fault: Fault) -> Aim | None:
        deadline = time.monotonic() + AIM_S
        while time.monotonic() < deadline:
            with contextlib.suppress(AwayError):
                if (aim := await fault.aim()) is not None:
                    return aim
            await asyncio.sleep(0.1)
        return None

    async def _carry_out(self, fault: Fault, aim: Aim, struck: Struck, hit: asyncio.Event) -> None:
        struck.target, struck.at = aim.target, time.time()
        committed, began = self.watcher.committed, time.monotonic()
        try:
            await fault.strike()
            hit.set()
            struck.in_flight = len(aim.places)
            with contextlib.suppress(AwayError):
                # What still has no result now was in flight when it struck.
                struck.in_flight = len(await without_result(self.world.reader, aim.places))
                seen = await snapshot(self.world.reader)
                committed = max(committed, seen.committed if seen else 0)
            moving = asyncio.create_task(self._first_commit(committed, began))
            await fault.hold()
        finally:
            hit.set()
            await asyncio.shield(fault.heal())
        struck.held_s = time.monotonic() - began
        struck.first_commit_s = await moving
        struck.settled_s = await self._settled(aim.places, began)
        struck.effect, struck.blames = fault.effect(), fault.blames
        struck.counted = bool(struck.effect) and struck.in_flight > 0
        struck.overlaps = struck.overlaps or len(self._going) > 1
        self.report.faults.append(struck)
        if not struck.counted:
            self._repeat(struck.kind)
        counted = sum(1 for f in self.report.faults if f.counted)
        self._say(
            f"{self.report.database:8} {counted:3}/{self._faults} {struck.kind:24} {struck.target:24} "
            f"{struck.in_flight:3} in flight, held {struck.held_s:4.1f} s, first commit {struck.first_commit_s:4.1f} s, "
            f"settled {struck.settled_s:4.1f} s; {struck.effect or 'NO EFFECT, does not count'}"
            f"{' (overlapping)' if struck.overlaps else ''}"
        )

    async def _first_commit(self, committed: int, began: float) -> float:
        if not await self.watcher.until(lambda: self.watcher.committed > committed, STALL_S):
            self.world.object_to(f"nothing was committed for {STALL_S:.0f} s after a fault at {committed} rows")
        return time.monotonic() - began

    async def _settled(self, places: set[tuple[int, int]], began: float) -> float:
        """Seconds until every row that was in flight has its result."""
        left = places
        while left:
            if time.monotonic() - began > 2 * STALL_S:
                self.world.object_to(f"{len(left)} rows that a fault struck have no result, e.g. {min(left)}")
                break
            await asyncio.sleep(0.1)
            with contextlib.suppress(AwayError):
                left = await without_result(self.world.reader, left)
        return time.monotonic() - began

    # ---- the end

    async def _finish(self, working: list[asyncio.Task[None]]) -> None:
        for client in self.clients:
            client.leaving = True
        _, late = await asyncio.wait(working, timeout=2 * STALL_S)
        if late:
            self.world.object_to(f"batches were not finished {2 * STALL_S:.0f} s after the last fault")

    async def _judge(self) -> None:
        world = self.world
        await asyncio.sleep(0.5)  # assignments of finished runs are retired with the next transaction
        ledger = await load(world.reader)
        # First of all: judging keeps this process busy, and the network of those that run is in it.
        await world.stop()
        found = [f"left running: {orphan}" for orphan in await world.orphans()]
        leaders = {row[2]: d.name for row in ledger.seen_leases if (d := world.coordinator_at(row[5])) is not None}
        writers = {port: {name for _, name in names} for port, names in world.ports.items()}
        batches = [batch for client in self.clients for batch in client.batches]
        found += [*check_ledger(ledger), *check_audit(ledger, leaders, writers)]
        for batch in batches:
            found += await asyncio.to_thread(check_files, Expected(batch.output, batch.rows, POISON), ledger)
        failures = self._worker_failures()
        windows = [Window(f.at, f.at + max(f.held_s, f.settled_s), f.blames) for f in self.report.faults]
        found += unexplained(failures, windows, self._killed_incarnations(), FAILURE_GRACE_S)
        for objection in found:
            world.object_to(objection)
        if world.objections:
            # What was judged, to judge it again: the database is gone by then.
            evidence = pickle.dumps((ledger, leaders, writers))
            await asyncio.to_thread((world.root / "judged.pickle").write_bytes, evidence)
        self.report.totals = self._totals(ledger, batches, failures)

    def _worker_failures(self) -> list[tuple[float, str, str]]:
        """Unix time, worker, incarnation."""
        found: list[tuple[float, str, str]] = []
        for daemon in self.world.coordinators:
            for entry in daemon.read_log():
                if entry["event"] == "worker_failed":
                    worker = self.world.worker_of(entry["worker"])
                    name = worker.name if worker else entry["worker"]
                    found.append((record.unix(entry["timestamp"]), name, entry["worker"]))
        return found

    def _killed_incarnations(self) -> set[str]:
        """Of each worker that was killed, the one that had started last by then."""
        found: set[str] = set()
        for fault in self.report.faults:
            for daemon in self.world.workers:
                if fault.kind == "worker killed" and fault.target == daemon.name:
                    starts = [e for e in daemon.read_log() if e["event"] == "worker_starting"]
                    before = [e["worker"] for e in starts if record.unix(e["timestamp"]) < fault.at]
                    found.update(before[-1:])
        return found

    def _totals(self, ledger: Any, batches: list[Any], failures: list[Any]) -> dict[str, Any]:
        return {
            "batches": len(batches),
            "rows": len(ledger.results),
            "attempts": sum(row[2] for row in ledger.results),
            "commands": sum(batch.starts for batch in batches),
            "not_connected": sum(client.not_connected for client in self.clients),
            "epochs": ledger.lease[0][0] + 1,
            "transactions": ledger.lease[0][1],
            "worker_failed": len(failures),
            "coordinator_fenced": sum(d.count("coordinator_fenced") for d in self.world.coordinators),
            "work_stolen": sum(d.count("work_stolen") for d in self.world.coordinators),
            "looks": self.watcher.looks,
            "longest_pause_s": round(self.watcher.longest_pause_s, 2),
        }


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
    parser.add_argument("--database", choices=("sqlite", "postgres", "both"), default="both")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    parser.add_argument("--minutes", type=float, default=120.0, help="no further fault after so long")
    parser.add_argument("--together", action="store_true", help="both databases at the same time")
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    parser.add_argument("--record", action="store_true", help="write docs/chaos.md")
    parser.add_argument("--reports", type=Path, nargs="+", help="strike nothing: write docs/chaos.md from kept reports")
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
    """docs/chaos.md, objections included."""
    path = Path(__file__).resolve().parents[2] / "docs" / "chaos.md"
    path.write_text(record.page(reports))


if __name__ == "__main__":
    sys.exit(main())
