"""What bench_gpu.py says of a step of decoding, without a GPU: the floors of a shape, and which bound is named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def gpu() -> Any:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    try:
        return importlib.import_module("bench_gpu")
    finally:
        del sys.path[0]


def test_floors_are_those_of_the_shape(gpu: Any) -> None:
    step = gpu.Step(sequences=256, length=200.0, seconds=0.02)
    assert gpu.HALF_BILLION.parameters == 494_005_120
    # 24 layers, a key and a value of 2 heads of 64 in two bytes each are 12,288 bytes a token that is held.
    assert gpu.least_bytes(gpu.HALF_BILLION, step) == 2 * 494_005_120 + 12_288 * 200 * 256
    # Two for each weight; attention multiplies and adds for 14 heads of 64, with keys and with values.
    assert gpu.least_flops(gpu.HALF_BILLION, step) == 256 * (2 * 494_005_120 + 4 * 24 * 14 * 64 * 200)


def test_embeddings_of_their_own_are_looked_up_and_not_read(gpu: Any) -> None:
    from rollout_worker.backends.tiny import TINY

    step = gpu.Step(sequences=1, length=0.0, seconds=1.0)
    used = TINY.parameters - TINY.vocabulary * TINY.hidden
    assert gpu.least_bytes(TINY, step, size=4) == 4 * used
    assert gpu.least_flops(TINY, step) == 2 * used


@pytest.mark.parametrize(
    ("seconds", "working", "flops", "said"),
    [
        (10e-3, 2e-3, 800e12, "bound by the host, which launches them"),
        (2e-3, 1.8e-3, 800e12, "bound by kernels that reach 30 % of what memory allows"),
        (0.7e-3, 0.6e-3, 800e12, "bound by memory"),
        (4e-3, 3.6e-3, 80e12, "bound by arithmetic"),
        (2e-3, None, 800e12, "3.7 times the floor, memory"),
    ],
)
def test_the_bound_is_named(gpu: Any, seconds: float, working: float | None, flops: float, said: str) -> None:
    """The floors of these steps: memory 0.54 ms; arithmetic 0.32 ms, and 3.2 ms at a tenth of the rate."""
    step = gpu.Step(256, 200.0, seconds, working, None if working is None else 700)
    found = gpu.bound(gpu.HALF_BILLION, step, gpu.Rates(bytes_s=3e12, flops_s=flops))
    assert found.endswith(said), found
