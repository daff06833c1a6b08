"""Suites of tests that are run as a user's project is: by `pytest_runner.py`, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout.workloads import test

RUNNER = Path(test.__file__).with_name("pytest_runner.py")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def environment(plugins: bool = False) -> dict[str, str]:
    """Without the plugins that are installed here, most of which a suite does without."""
    return os.environ | ({} if plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def collect(
    root: Path, *arguments: str, plugins: bool = False
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    out = root / "collected.jsonl"
    command = [sys.executable, str(RUNNER), "collect", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=environment(plugins))
    return [json.loads(line) for line in out.read_text().splitlines()], done
