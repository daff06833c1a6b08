"""What a worker imports when it starts."""

from __future__ import annotations

import subprocess
import sys

from rollout_worker.wiring import load_executors


def test_what_only_trials_need_waits_for_a_run_that_has_some() -> None:
    code = (
        "import sys; from rollout_worker.wiring import load_executors; print('job' in load_executors(),"
        "any(name.startswith('rollout_worker.trials') for name in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]


def test_executors_that_nobody_wants_are_not_loaded() -> None:
    assert list(load_executors(["script"])) == ["script"]
    assert len(load_executors(["script", "nosuch"])) > 1  # `offered` says which there are
