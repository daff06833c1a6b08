"""The long lane: every fuzz test again with random seeds and more examples, and the coverage-guided fuzzer.

`FUZZ_TIMES` (default 20) multiplies the examples, `FUZZ_SECONDS` (default 60) is the time of each coverage-guided target.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = sorted(p.name for p in HERE.glob("test_fuzz_*.py") if p.name != Path(__file__).name)
TARGETS = ("worker_frames", "client_frames", "coordinator_frames", "child_frames", "toml", "jsonl", "sidecar")
TIMES = os.environ.get("FUZZ_TIMES", "20")
SECONDS = os.environ.get("FUZZ_SECONDS", "60")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("module", MODULES)
def test_more_of(module: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    command = [sys.executable, "-m", "pytest", str(HERE / module), "-q", "--timeout=3600", f"--hypothesis-seed={seed}"]
    done = subprocess.run(command, env=os.environ | {"FUZZ_TIMES": TIMES}, capture_output=True, text=True, check=False)
    replay = f"FUZZ_TIMES={TIMES} pytest tests/fuzz/{module} --hypothesis-seed={seed}"
    print(f"{replay}: {done.stdout.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{replay}\n{done.stdout[-8000:]}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", TARGETS)
def test_coverage_guided(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86_64 only")
    seed = random.SystemRandom().randrange(1, 1 << 31)
    options = [f"-max_total_time={SECONDS}", f"-seed={seed}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096"]
    command = [sys.executable, str(HERE / "coverage_guided.py"), target, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    last = next((line for line in reversed(output.splitlines()) if "Done" in line or "cov:" in line), "")
    print(f"{target} (-seed={seed}): {last}")
    assert done.returncode == 0, f"{target}: {list(tmp_path.iterdir())}\n{output[-6000:]}"
