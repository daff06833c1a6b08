"""Cost of the core alone, per item: submit, dispatch, started, result, commit in batches.

Run: python tests/bench/bench_core.py [items]     (add --profile for cProfile)
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time

from measure import Row, spread
from rollout.model.item import DEFAULT_SPEC
from rollout.model.run import RunSpec
from rollout.model.worker import Credit, Inventory
from rollout_coordinator.core.core import Core
from rollout_coordinator.core.events import (
    Event,
    Keys,
    Loaded,
    Now,
    PendingItem,
    ResultGroup,
    SubmitItems,
    SubmitOpen,
    SubmitSeal,
    WorkerHello,
    WorkerResults,
    WorkerStarted,
)
from rollout_coordinator.core.settings import CoreSettings
from rollout_coordinator.core.step import LoadPending, SendAssign, Step


def run(items: int, batch: int, workers: int = 2) -> tuple[float, float, int]:
    core = Core(CoreSettings())
    clock = 0.0
    spent = 0.0

    def handle(*events: Event) -> Step:
        nonlocal spent, clock
        clock += 0.0005
        began = time.process_time()
        step = core.handle(events, Now(clock, int(clock * 1000)))
        spent += time.process_time() - began
        return step

    handle(SubmitOpen(1, RunSpec("R", "script", b"{}")))
    for i in range(workers):
        credit = Credit(2 * batch, 64 << 20)
        handle(WorkerHello(f"s{i}", f"w{i}", "h", Inventory(capacity=(("slots", 1e9),)), credit))
    queue: list[SendAssign] = []
    sent = done = window = 0
    payload = b"x" * 256
    while done < items:
        events: list[Event] = []
        while sent < items and sent - done < 4000:
            n = min(batch, items - sent)
            ids = [b"%032d" % i for i in range(sent, sent + n)]
            events.append(SubmitItems(2, "R", sent, ids, [payload] * n, (DEFAULT_SPEC,)))
            sent += n
            if sent == items:
                events.append(SubmitSeal(3, "R", items))
        for assign in queue:
            for g in assign.groups:
                n = len(g.seq)
                events.append(WorkerStarted(assign.session, [Keys(g.log, g.seq, g.attempt)]))
                group = ResultGroup(g.log, g.seq, g.attempt, None, [payload] * n, {}, [1] * n)
                events.append(WorkerResults(assign.session, [group]))
                done += n
        step = handle(*events)
        queue = [s for s in step.sends if isinstance(s, SendAssign)]
        for load in step.loads:
            assert isinstance(load, LoadPending)
            last = min(sent, load.from_seq + load.limit)
            rows = [PendingItem(i, b"%032d" % i, 0, payload) for i in range(load.from_seq, last)]
            more = handle(Loaded(load.load_id, load.log, rows, last, last == sent))
            queue += [s for s in more.sends if isinstance(s, SendAssign)]
        window = max(window, int(core.gauges()["window_items"]))
    view = core.run_view("R")
    assert view is not None and view.cursor == items and view.state == "completed", view
    return spent, spent / items * 1e6, window


def rows(quick: bool) -> list[Row]:
    items = 50_000 if quick else 200_000
    found: dict[int, list[float]] = {}
    for batch in (100, 1):
        found[batch] = [run(items if batch > 1 else items // 20, batch)[1] for _ in range(3)]
    return [
        Row(
            "submit to commit, core alone",
            f"{spread(found[100])} µs in batches of 100, {spread(found[1], 1)} µs in batches of 1",
            values={"us_per_item": min(found[100])},
        )
    ]


def main() -> None:
    numbers = [a for a in sys.argv[1:] if a.isdigit()]
    items = int(numbers[0]) if numbers else 200_000
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        profile.runcall(run, items, 100)
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        return
    print(f"{'batch':>6} {'items':>8} {'CPU s':>7} {'us/item':>8} {'window':>7}")
    for batch in (1, 10, 100, 256):
        n = items if batch >= 100 else items // 10
        spent, each, window = run(n, batch)
        print(f"{batch:>6} {n:>8} {spent:>7.2f} {each:>8.2f} {window:>7}")


if __name__ == "__main__":
    main()
