"""Seeds a second of the deterministic simulation, on one core."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from measure import TESTS, Row


def rows(quick: bool) -> list[Row]:
    seeds = 10 if quick else 200
    command = [sys.executable, str(TESTS / "sim" / "run.py"), "--seeds", f"0..{seeds}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"tests/sim/run.py said: {(done.stdout + done.stderr)[-500:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    rate, broken = float(said["seeds_per_cpu_second"]), len(said["broken"])
    return [
        Row(
            "whole clusters, with faults",
            f"{rate:.1f} seeds/s of processor time ({seeds:,} seeds of {said['core_steps'] / seeds:,.0f} core steps, "
            f"{sum(said['faults'].values()) / seeds:.1f} faults; {broken} violations)",
            "≥12 seeds/s a core",
            rate >= 12 and not broken,
            {"seeds_per_s": rate},
        )
    ]
