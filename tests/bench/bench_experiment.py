"""The facts of 100,000 trials: analysed, queried and reported. Run: python tests/bench/bench_experiment.py [--count N]

Each command is a process of its own: seconds from its start to its end, and its largest resident size.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from measure import Row, directory, machine, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiment"))

from facts_maker import Truth, make_facts

COUNT = 100_000
REPLICATIONS = 3
VARIANTS = {"control": Truth(lost=0.03), "same": Truth(crash=0.02), "better": Truth(shift=0.3, cost=0.008)}
ROLLOUT = [sys.executable, "-m", "rollout.cli"]
TARGET_S = 30.0
TARGET_MIB = 1024


def run(*arguments: str) -> tuple[float, float]:
    """(seconds, peak MiB) of `rollout experiment ARGUMENTS`."""
    began = time.monotonic()
    process = subprocess.Popen([*ROLLOUT, "experiment", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"rollout experiment {arguments[0]} ended with {process.returncode}")
    return time.monotonic() - began, usage.ru_maxrss / 1024


def rows(quick: bool, count: int = COUNT) -> list[Row]:
    count = count // 10 if quick else count
    with directory() as root:
        tasks = count // (len(VARIANTS) * REPLICATIONS)
        facts = str(make_facts(root / "run", VARIANTS, tasks=tasks, replications=REPLICATIONS, margin=0.02))
        trials = tasks * len(VARIANTS) * REPLICATIONS
        page = str(root / "run" / "report.html")
        what = f"{trials:,} trials, {len(VARIANTS)} variants, {tasks:,} tasks"
        commands = {
            f"analyze: {what}": ("analyze", facts, "--json"),
            "query of one view": ("query", facts, "FROM win_loss_tie", "--format", "json"),
            "report, 1,000 trials listed": ("report", facts, "--output", page),
            "report, all listed": ("report", facts, "--output", page, "--trials", str(trials)),
        }
        found: list[Row] = []
        for name, arguments in commands.items():
            measured = [run(*arguments) for _ in range(1 if quick else 3)]
            seconds, peaks = zip(*measured, strict=True)
            size = f", {Path(page).stat().st_size / 2**20:.1f} MiB of HTML" if arguments[0] == "report" else ""
            found.append(
                Row(
                    name,
                    f"{spread(seconds, 1)} s, peak {spread(peaks, 0)} MiB{size}",
                    f"≤{TARGET_S:.0f} s, ≤{TARGET_MIB:,} MiB",
                    max(seconds) <= TARGET_S and max(peaks) <= TARGET_MIB,
                    {"seconds": seconds[0], "peak_mib": peaks[0]},
                )
            )
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT)
    given = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for row in rows(False, given.count):
        print(f"{row.what}: {row.figure} [{row.target}: {row.verdict}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
