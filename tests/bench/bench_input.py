"""Rows of a parquet file that are checked a second, and made into items, in one process, and the memory that this takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
from measure import Row, directory

_CHILD = r"""
import json, re, sys, time
from pathlib import Path
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.infer.plan import plan
from rollout.workloads.infer.rows import check_input
from rollout.workloads.port import InputReader

config = InferConfig.model_validate({
    "model": {"uri": "mock"}, "backend": {"kind": "mock"}, "output": {"dir": "out"},
    "input": {"glob": sys.argv[1], "columns": {"question": "prompt"}},
})
began, busy = time.perf_counter(), time.process_time()
found = check_input(config, InputReader(exclude=Path("out")))
busy, took = time.process_time() - busy, time.perf_counter() - began
planning = time.process_time()
items = sum(1 for _ in plan(config, "00" * 32, found.source.rows(0)))
planning = time.process_time() - planning
assert items == found.report.rows
found.close()
peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024
print(json.dumps({"rows": found.report.rows, "busy_s": busy, "took_s": took, "planning_s": planning, "peak_mib": peak}))
"""


def checked(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=path.parent).stdout)


def write(path: Path, count: int) -> None:
    """One row group: what must not be in memory as a whole."""
    numbers = range(count)
    texts = [f"Translate sentence number {n} to French, please." for n in numbers]
    table = pa.table({"question": texts, "score": [n / 7 for n in numbers], "tag": ["demo"] * count})
    parquet.write_table(table, path, row_group_size=count)


def rows(quick: bool) -> list[Row]:
    count = 100_000 if quick else 1_000_000
    with directory() as root:
        write(root / "few.parquet", count // 10)
        write(root / "many.parquet", count)
        few, many = checked(root / "few.parquet"), checked(root / "many.parquet")
    rate = many["rows"] / many["busy_s"]
    planned = many["rows"] / many["planning_s"]
    grown = many["peak_mib"] - few["peak_mib"]
    return [
        Row(
            f"check of {count:,} Parquet rows",
            f"{rate:,.0f} rows/s of processor time ({many['rows'] / many['took_s']:,.0f} of wall time), peak "
            f"{many['peak_mib']} MiB (a tenth: {few['peak_mib']})",
            "≥100,000 rows/s, memory flat",
            rate >= 100_000 and grown < 32,
            {"rows_per_s": rate, "peak_mib": many["peak_mib"]},
        ),
        Row(
            "second read, making items",
            f"{planned:,.0f} rows/s of processor time",
            "≥100,000 rows/s",
            planned >= 100_000,
            {"rows_per_s": planned},
        ),
    ]
