"""Paths of the fakes that other test directories share."""

from __future__ import annotations

import sys
from pathlib import Path

for shared in ("core", "integration"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / shared))
