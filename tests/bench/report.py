"""Every row of the table of targets, measured on this machine: prints them and writes them into docs/benchmarks.md.

Run: python tests/bench/report.py [--only NAME ...] [--quick] [--json] [--no-write]      (or `make bench`)

The page has each part's first row and the rows with a target; the terminal and --json have all.

A part is a module with `rows(quick) -> list[Row]`. Modules named bench_overhead_*.py that have it are parts too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Row, machine  # puts tests/ on the path
from overhead import end_cleanly
from results_page import PAGE, write_section
from rollout.cli.malloc import tune_malloc

HERE = Path(__file__).resolve().parent
PARTS = {
    "core": "bench_core",
    "scale": "bench_scale",
    "throughput": "bench_engine",
    "payload": "bench_payload",
    "input": "bench_input",
    "latency": "bench_latency",
    "relay": "bench_relay",
    "beats": "bench_beats",
    "fleet": "bench_fleet",
    "restart": "bench_restart",
    "failover": "bench_failover",
    "map": "bench_map",
    "queue": "bench_queue",
    "intake": "bench_intake",
    "printing": "bench_printing",
    "ui": "bench_ui",
    "serve": "bench_serve",
    "sandboxes": "bench_sandboxes",
    "s3": "bench_s3",
    "job": "bench_job",
    "experiment": "bench_experiment",
    "test": "bench_test_offload",
    "worker": "bench_worker_loss",
    "train": "bench_train",
    "rl": "bench_rl",
    "gcs": "bench_gcs",
    "growth": "bench_growth",
    "simulation": "bench_sim",
    "gpu": "bench_gpu",
    "lengths": "bench_lengths",
}
"""By name, in the order of the report."""


def parts() -> dict[str, str]:
    found = dict(PARTS)
    for path in sorted(HERE.glob("bench_overhead_*.py")):
        found[path.stem.removeprefix("bench_").replace("_", "-")] = path.stem
    return found


def measure(name: str, module: str, quick: bool) -> list[Row]:
    """A part that fails is a row that says so: the others are still worth their time."""
    try:
        rows: Callable[[bool], list[Row]] | None = getattr(importlib.import_module(module), "rows", None)
        return [] if rows is None else rows(quick)
    except Exception as error:  # noqa: BLE001 - whatever it is, it goes into the report and the exit code
        traceback.print_exc()
        return [Row(f"{name}: could not be measured", f"{type(error).__name__}: {error}", reached=False)]


def markdown(found: dict[str, list[Row]], named: dict[str, str], quick: bool, seconds: float) -> list[str]:
    lines = [
        ", ".join(f"{key} {value}" for key, value in named.items())
        + f"; {seconds / 60:.0f} minutes{', with --quick' if quick else ''}.",
        "",
        "what | measured | target",
        "---|---|---",
    ]  # fmt: skip
    for name, (first, *others) in found.items():
        for row in (first, *(other for other in others if other.target or other.reached is False)):
            target = f"{row.target}: **missed**" if row.reached is False else row.target
            cells = (f"**{name}** {row.what}" if row is first else row.what, row.figure, target)
            lines.append(" | ".join(cell.replace("|", "\\|") for cell in cells if cell))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], choices=sorted(parts()), help="this part; repeatable")
    parser.add_argument("--quick", action="store_true", help="fewer items and repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    parser.add_argument("--no-write", action="store_true", help="leave docs/benchmarks.md as it is")
    given = parser.parse_args()
    tune_malloc()  # as the commands do
    end_cleanly()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    began = time.monotonic()
    named = machine()
    out = sys.stderr if given.json else sys.stdout
    print(", ".join(f"{key} {value}" for key, value in named.items()), file=out, flush=True)
    found: dict[str, list[Row]] = {}
    for name, module in parts().items():
        if given.only and name not in given.only:
            continue
        started = time.monotonic()
        rows = measure(name, module, given.quick)
        if not rows:
            continue  # a script of its own
        found[name] = rows
        for row in found[name]:
            text = f"{row.what}: {row.figure}" + (f"  [{row.target}: {row.verdict}]" if row.target else "")
            print(textwrap.fill(text, 118, initial_indent=f"{name:>18}  ", subsequent_indent=" " * 20), file=out)
        print(f"{'':>18}  ({time.monotonic() - started:.0f} s)", file=out, flush=True)
    seconds = time.monotonic() - began
    if given.json:
        print(json.dumps({"machine": named, "rows": {name: [asdict(r) for r in rows] for name, rows in found.items()}}))
    if not given.only and not given.no_write:
        write_section("targets", markdown(found, named, given.quick, seconds))
        print(f"written: {PAGE.relative_to(HERE.parents[1])} ({seconds / 60:.1f} minutes)", file=out)
    failed = [row for rows in found.values() for row in rows if "could not be measured" in row.what]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
