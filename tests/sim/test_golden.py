"""Golden scenarios: short ones that once broke an invariant, or would without a safeguard, and how they go.

`REWRITE_GOLDEN=1 pytest tests/sim/test_golden.py` writes what happens now.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sim_scenario import load
from simulate import run

FILES = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    scenario, _, told = path.read_text().partition("\n---\n")
    happened = "".join(f"{line}\n" for line in run(load(scenario), steps_min=0).outline)
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(f"{scenario}\n---\n{happened}")
    else:
        assert happened == told
