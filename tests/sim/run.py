"""`python tests/sim/run.py --seeds A..B [--json]`, `--replay SEED|FILE`, `--shrink SEED`.

Prints seeds per second (of one core), what struck and which transitions were taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from sim_generate import generate
from sim_scenario import Scenario, dump, load
from sim_shrink import shrink
from sim_world import STEPS_MIN
from simulate import Violation, run


def scenario_of(word: str) -> Scenario:
    return generate(int(word)) if word.isdigit() else load(Path(word).read_text().partition("\n---\n")[0])


def seeds(first: int, last: int, as_json: bool) -> int:
    faults: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    events: Counter[str] = Counter()
    steps = idle = commits = 0
    virtual = 0.0
    broken: list[str] = []
    began, used = time.perf_counter(), time.process_time()
    told = began
    gc.collect()
    gc.freeze()
    for seed in range(first, last):
        if time.perf_counter() - told > 10.0:
            told = time.perf_counter()
            print(f"{seed - first} of {last - first} seeds, {len(broken)} violations", file=sys.stderr, flush=True)
        try:
            report = run(generate(seed))
        except Violation as violation:
            broken.append(str(violation))
            print(violation, file=sys.stderr)
            continue
        faults += report.faults
        events += report.events
        taken.update({" ".join(key): n for key, n in report.transitions.items()})
        steps, idle, commits = steps + report.steps, idle + report.idle_steps, commits + report.commits
        virtual += report.seconds
    count = last - first
    cpu = time.process_time() - used
    body: dict[str, Any] = {
        "seeds": count, "broken": broken, "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(cpu, 2), "seeds_per_cpu_second": round(count / cpu, 1), "core_steps": steps,
        "idle_steps": idle, "commits": commits, "virtual_seconds": round(virtual), "faults": dict(sorted(faults.items())),
        "events": dict(sorted(events.items())), "transitions": dict(sorted(taken.items())),
    }  # fmt: skip
    if as_json:
        print(json.dumps(body, indent=1))
    else:
        for key, value in body.items():
            if isinstance(value, dict):
                print(f"{key}:")
                for name, number in value.items():
                    print(f"  {number:9} {name}")
            elif key != "broken":
                print(f"{key}: {value}")
        print(f"violations: {len(broken)}")
    return 1 if broken else 0


def replay(word: str) -> int:
    try:
        report = run(scenario_of(word), trace=True, steps_min=STEPS_MIN if word.isdigit() else 0)
    except Violation as violation:
        print("\n".join(violation.tail))
        print(violation)
        return 1
    print("\n".join(report.trace))
    print(f"digest {report.digest}")
    return 0


def make_small(word: str) -> int:
    scenario = scenario_of(word)
    try:
        run(scenario)
    except Violation as violation:
        small = shrink(scenario, violation.invariant, lambda s: print(f"# {len(s.faults)} faults", file=sys.stderr))
        print(f"# {violation.invariant}: {violation.message[:200]}")
        print(dump(small), end="")
        return 1
    print("it does not fail", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="A..B", help="simulate these, B not among them")
    parser.add_argument("--replay", metavar="SEED|FILE", help="one of them, with its trace")
    parser.add_argument("--shrink", metavar="SEED|FILE", help="make a failing one small, print it")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.replay:
        return replay(options.replay)
    if options.shrink:
        return make_small(options.shrink)
    first, _, last = (options.seeds or "0..100").partition("..")
    return seeds(int(first), int(last), options.json)


if __name__ == "__main__":
    sys.exit(main())
