"""Suites of tests that are run as a user's project is: by `pytest_runner.py`, in processes of their own.

`suites.py DIRECTORY LIMIT_S BATCHES` runs all tests of one as a worker does, and prints what came of each.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout.workloads import test
from rollout.workloads.test.cases import Try
from rollout_worker.testing.host import Host
from rollout_worker.testing.place import LocalPlace

RUNNER = Path(test.__file__).with_name("pytest_runner.py")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def environment(root: Path, plugins: bool = False) -> dict[str, str]:
    """Without the plugins that are installed here, most of which a suite does without. A pytest that ends clears
    temporary directories of earlier ones away, which takes long in the system's."""
    own = {"PYTEST_DEBUG_TEMPROOT": str(root)}
    return os.environ | own | ({} if plugins else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def collect(
    root: Path, *arguments: str, plugins: bool = False
) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    out = root / "collected.jsonl"
    command = [sys.executable, str(RUNNER), "collect", "--out", str(out), *arguments]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, env=environment(root, plugins)
    )
    lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines], done


def ids_of(root: Path, *arguments: str, plugins: bool = False) -> list[str]:
    return [event["case"]["id"] for event in collect(root, *arguments, plugins=plugins)[0] if "case" in event]


async def run(
    root: Path, ids: list[str], *arguments: str, limit_s: float = 0, batches: int = 1, alone: bool = False,
    last: bool = False,
) -> dict[str, Try]:  # fmt: skip
    """In batches of one warm process, in the order of `ids`. `last`: each batch ends it."""
    host = Host(LocalPlace(RUNNER, root, environment(root, bool(arguments)), alone=alone), [sys.executable], arguments)
    tries: dict[str, Try] = {}
    try:
        for at in range(batches):
            await host.run(ids[at::batches], limit_s, lambda _: None, tries, last=last)
    finally:
        fault = await host.close()
    return tries | ({"(session)": Try(outcome=tries[ids[0]].outcome, message=fault)} if fault else {})


def in_bubblewrap(root: Path, limit_s: float, batches: int) -> dict[str, Try]:
    """As `run`, where processes neither see those of this machine nor outlive it."""
    box = shutil.which("bwrap")
    assert box is not None
    command = [box, "--dev-bind", "/", "/", "--unshare-pid", "--unshare-net", "--proc", "/proc", "--die-with-parent"]
    command += [sys.executable, __file__, str(root), str(limit_s), str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(root))
    return {one: Try.model_validate(made) for one, made in json.loads(done.stdout).items()}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    made = asyncio.run(run(place, ids_of(place), limit_s=float(sys.argv[2]), batches=int(sys.argv[3]), alone=True))
    print(json.dumps({one: value.model_dump(mode="json") for one, value in made.items()}))
