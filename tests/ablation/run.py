"""Takes each safeguard out and counts what notices it.

    python tests/ablation/run.py                     every safeguard, its tests and the simulation
    python tests/ablation/run.py --only NAME         one of them (may be given again)
    python tests/ablation/run.py --fast              each by its first test only, without databases and processes
    python tests/ablation/run.py --seeds N --write   N seeds of the simulation, and docs/ablations.md anew
    python tests/ablation/run.py --only NAME --also FILE --write    the rest from an earlier run's --json FILE
    python tests/ablation/run.py --only NAME --find FILE...    which tests of these files notice it

Exit code 1: something was not noticed, or a detector fails though nothing was removed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import detection  # noqa: E402
from removal import StaleEditError  # noqa: E402
from report import document  # noqa: E402
from safeguard import Safeguard  # noqa: E402
from table import ALL, BY_NAME  # noqa: E402

DOCUMENT = detection.ROOT / "docs" / "ablations.md"


@dataclass(slots=True)
class Row:
    """What became of one safeguard's removal."""

    name: str
    tests: int = 0
    caught: int = 0
    seeds: int = 0
    invariants: dict[str, int] = field(default_factory=dict[str, int])
    reasons: list[str] = field(default_factory=list[str])
    fault: str = ""  # why this row is not as it should be
    skipped: bool = False  # its tests cannot be run on this machine, or only in the long form


def examine(one: Safeguard, tests: detection.Tests, *, fast: bool, seeds: int) -> Row:
    row = Row(one.name)
    if fast and one.slow:
        row.skipped = True
        return row
    nodes = one.tests[:1] if fast else one.tests
    edits = one.edits
    if one.covered_by:
        alone = tests.run(nodes, edits, first=fast)
        if alone.caught or alone.trouble:
            row.fault = f"it is said to be covered by {one.covered_by!r}, but its removal alone is noticed"
            return row
        edits = (*BY_NAME[one.covered_by].edits, *one.edits)
    outcome = tests.run(nodes, edits, first=fast)
    row.tests, row.caught = len(outcome.tests), len(outcome.caught)
    row.reasons = [outcome.tests[name] for name in outcome.caught][:3]
    if outcome.skipped and len(outcome.skipped) == len(outcome.tests):
        row.skipped = True
    elif outcome.trouble:
        row.fault = outcome.trouble
    else:
        caught = {name.removeprefix("tests/") for name in outcome.caught}
        for node in nodes:
            if not caught & {item.nodeid.removeprefix("tests/") for item in tests.of(node)}:
                row.fault = f"{node} does not notice"
    if one.simulated and not fast and seeds and not row.fault:
        simulated = detection.run_seeds(range(seeds), one.edits)
        row.seeds, row.invariants = simulated.seeds, dict(simulated.invariants)
        if simulated.trouble:
            row.fault = simulated.trouble
        elif not simulated.invariants:
            row.fault = f"the simulation does not notice in {seeds} seeds"
    return row


def baseline(chosen: list[Safeguard], tests: detection.Tests, *, seeds: int) -> list[str]:
    """Detectors that fail though nothing was removed."""
    nodes = list(dict.fromkeys(node for one in chosen for node in one.tests))
    outcome = tests.run(nodes)
    faults = [f"{name}: {outcome.tests[name]}" for name in outcome.caught]
    faults += [outcome.trouble] if outcome.trouble else []
    if seeds and any(one.simulated for one in chosen):
        simulated = detection.run_seeds(range(seeds))
        faults += [f"simulation: {name}" for name in simulated.invariants]
    return faults


def describe(row: Row) -> str:
    if row.fault:
        return f"FAULT: {row.fault}"
    if row.skipped:
        return "skipped"
    seen = f"{row.caught} of {row.tests} tests"
    if row.seeds:
        seen += f", {sum(row.invariants.values())} of {row.seeds} seeds: " + ", ".join(sorted(row.invariants))
    return seen


def carry_out(chosen: list[Safeguard], *, fast: bool, seeds: int) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    faults: list[str] = []
    if seeds and not fast:
        detection.load_simulation()  # once, for all children

    def use(tests: detection.Tests) -> None:
        if not fast:  # the lane that runs the fast form runs these tests by themselves too
            faults.extend(baseline(chosen, tests, seeds=seeds))
        for fault in faults:
            print(f"without any removal: {fault}", flush=True)
        for one in chosen:
            try:
                row = examine(one, tests, fast=fast, seeds=seeds)
            except StaleEditError as error:
                row = Row(one.name, fault=str(error))
            rows.append(row)
            print(f"{one.name}: {describe(row)}", flush=True)

    nodes = list(dict.fromkeys(node for one in chosen if not (fast and one.slow) for node in one.tests))
    detection.with_tests(nodes, use, 30.0 if fast else 120.0)
    return rows, faults


def find(chosen: list[Safeguard], files: list[str]) -> None:
    def use(tests: detection.Tests) -> None:
        for one in chosen:
            outcome = tests.run(files, one.edits)
            print(f"{one.name}: {len(outcome.caught)} {outcome.trouble}", flush=True)
            for name in outcome.caught:
                print(f"    {name.removeprefix('tests/')}  ({outcome.tests[name]})", flush=True)

    detection.with_tests(files, use)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--also", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--find", nargs="+", default=[], metavar="FILE")
    given = parser.parse_args()
    unknown = [name for name in given.only if name not in BY_NAME]
    if unknown:
        parser.error(f"no safeguard {unknown[0]!r}")
    chosen = [one for one in ALL if not given.only or one.name in given.only]
    if given.find:
        find(chosen, given.find)
        return 0
    rows, faults = carry_out(chosen, fast=given.fast, seeds=given.seeds)
    if given.json:
        given.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "baseline": faults}))
    earlier: list[dict[str, Any]] = json.loads(given.also.read_text())["rows"] if given.also else []
    known = {row["name"]: row for row in [*earlier, *map(asdict, rows)]}
    if given.write and known.keys() >= BY_NAME.keys() and not given.fast:
        DOCUMENT.write_text(document({one.name: known[one.name] for one in ALL}, given.seeds))
    bad = [row for row in rows if row.fault]
    print(f"{len(rows)} safeguards, {len(bad)} not as they should be, {sum(row.skipped for row in rows)} skipped")
    return 1 if bad or faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
