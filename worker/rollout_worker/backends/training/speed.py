"""The speed of a step: tokens per second, and the share of the device's peak that the model's arithmetic used (MFU,
Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import re

from rollout.workloads.json_form import JsonObject

_TERA = 1e12

PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250.0, 75.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "A10": (125.0, 31.2),
    "A30": (165.0, 10.3),
    "A40": (149.7, 37.4),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}
"""Teraflops per second (bf16 with float32 sums, float32 without TF32), dense, by words in a device's name; the first
match counts. Sources: NVIDIA's data sheets and architecture papers of each (GH100, GA100, GA102, AD102; B200: DGX
B200's data sheet, a GPU of eight)."""


def peak(name: str, precision: str) -> float | None:
    """Return the peak operations per second of the device `name`, or None if it is not in the table, or a part of a
    device."""
    words = set(re.split(r"[\s-]+", name))
    if words & {"MIG", "Laptop"}:
        return None
    for known, (half, single) in PEAKS.items():
        if words.issuperset(known.split()):
            return (half if precision == "bf16" else single) * _TERA
    return None


def speed(tokens: int, seconds: float, flops_per_token: float, peak: float | None, devices: int) -> JsonObject:
    """Return the speed of a step over all devices. Without a known peak there is no `mfu`."""
    rate = tokens / max(seconds, 1e-9)
    found: JsonObject = {"tokens_per_second": round(rate, 1)}
    if peak is not None:
        found["mfu"] = round(rate * flops_per_token / (peak * devices), 4)
    return found
