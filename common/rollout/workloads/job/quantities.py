"""Parses amounts of memory, storage and processors in task and job files."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B?\s*", re.IGNORECASE)
_BYTES = re.compile(r"\s*(\d+)\s*(?:B|bytes)?\s*", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_CPUS = re.compile(r"\s*(\d+(?:\.\d+)?|\d+m)\s*")
SIZE_EXAMPLES = '"2G", "512M" or "512Mi"'
MIB_MAX = 1 << 40
CPUS_MAX = 1 << 16


def mebibytes(text: str) -> int:
    """Parse "2G", "512M", "512Mi", "2GiB" or plain bytes to MiB: every unit is a power of 1024, as in Docker.

    Raises ValueError if it is none of these, or less than 1 MiB.
    """
    if match := _SIZE.fullmatch(text):
        amount = float(match[1]) * _MIB[match[2].upper()]
    elif match := _BYTES.fullmatch(text):
        amount = int(match[1][:40]) / (1 << 20)
    else:
        raise ValueError(f'must be like {SIZE_EXAMPLES}, not "{text[:40]}"')
    if not 1 <= amount <= MIB_MAX:
        raise ValueError(f'must be at least 1 MiB and less than 2^40 MiB, such as {SIZE_EXAMPLES}, not "{text[:40]}"')
    return int(amount)


def processors(text: str) -> float:
    """Parse "1", "0.5" or "500m" (thousandths, as in Kubernetes) to processors. Raises ValueError."""
    match = _CPUS.fullmatch(text)
    if match is None:
        raise ValueError(f'must be like "1", "0.5" or "500m", not "{text[:40]}"')
    amount = float(match[1][:-1]) / 1000 if match[1].endswith("m") else float(match[1])
    if not 0 < amount <= CPUS_MAX:
        raise ValueError(f'must be more than 0 and at most {CPUS_MAX}, not "{text[:40]}"')
    return amount


def _size(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        raise ValueError(f"must say its unit, such as {SIZE_EXAMPLES}, not {value}")
    return mebibytes(value) if isinstance(value, str) else value


def _cpus(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a number, not {value}")
    return processors(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size)]
"""MiB, written with a unit."""
Mebibytes = Annotated[int, Field(ge=1, le=MIB_MAX)]
"""MiB, written as a number."""
Cpus = Annotated[float, Field(gt=0, le=CPUS_MAX), BeforeValidator(_cpus)]
"""Processors, as a number or text."""
