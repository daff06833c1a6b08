"""A job of trials of a second under `process`, beside the same scripts in a shell loop with as many at once.

The shell has no sandboxes, no ledger, no results: what it takes is what the scripts take. Of ours is counted from the
first trial's start to the last one's end, as the job's result.json says it; what a command takes beside it, to start a
private cluster and to end it, is told too. Run: python tests/bench/bench_job.py [--count N] [--at-once N]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from measure import Row, directory, machine

COUNT = 1000
WORK_S, CHECK_S = 0.9, 0.1
TARGET = 0.05
TASKS = 10

TOML = """version = "1.0"
dialect = "rollout"
[environment]
cpus = "{cpus:.4f}"
memory = "64M"
storage = "16M"
"""
SOLVE = f"#!/bin/bash\nsleep {WORK_S}\necho done > answer\n"
TEST = f"""#!/bin/bash
sleep {CHECK_S}
if [ "$(cat answer)" = done ]; then echo 1; else echo 0; fi > "${{LOGS:-/logs/verifier}}/reward.txt"
"""


def lay_out(root: Path, count: int, at_once: int) -> Path:
    """A job of `count` trials of the oracle; its tasks declare so much that `at_once` of them fill this host."""
    cpus = (os.cpu_count() or 1) / at_once
    files = {
        "task.toml": TOML.format(cpus=cpus),
        "instruction.md": "Write done into answer.\n",
        "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
        "solution/solve.sh": SOLVE,
        "tests/test.sh": TEST,
    }
    for number in range(TASKS):
        for name, text in files.items():
            path = root / "tasks" / f"task-{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    job = root / "job.yaml"
    values = {
        "name": "bench",
        "n_attempts": -(-count // TASKS),
        "n_concurrent_trials": at_once,
        "environment": {"type": "process"},
        "agents": [{"name": "oracle"}],
        "datasets": [{"path": "tasks"}],
    }
    job.write_text(json.dumps(values))
    return job


def processor_s() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shell(root: Path, count: int, at_once: int) -> float:
    """Seconds of a loop that runs the scripts of `count` trials, each in a directory of its own."""
    once = "mkdir -p shell/$0 && cd shell/$0 && bash ../../tasks/task-0/solution/solve.sh"
    once += " && LOGS=. bash ../../tasks/task-0/tests/test.sh"
    numbers = "\n".join(map(str, range(count)))
    began = time.monotonic()
    subprocess.run(
        ["xargs", "-P", str(at_once), "-n", "1", "bash", "-c", once], input=numbers, text=True, check=True, cwd=root
    )
    took = time.monotonic() - began
    rewards = [path.read_text() for path in root.glob("shell/*/reward.txt")]
    assert rewards == ["1\n"] * count, f"{len(rewards)} rewards of {count}"
    return took


def ours(root: Path, job: Path, count: int) -> tuple[float, float]:
    """(seconds from the job's start to its end, those of the whole command)."""
    began = time.monotonic()
    program = Path(sys.executable).with_name("rollout")
    env = os.environ | {name: str(root / name) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    done = subprocess.run([program, "job", "run", job, "--json"], cwd=root, env=env, capture_output=True, text=True)
    whole = time.monotonic() - began
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((root / "jobs" / "bench" / "result.json").read_text())
    assert (result["completed_trials"], result["mean_reward"]) == (count, 1.0), result
    return result["total_duration_sec"], whole


def measure(count: int, at_once: int) -> Row:
    with directory() as root:
        job = lay_out(root, count, at_once)
        begun = processor_s()
        loop_s = shell(root, count, at_once)
        between = processor_s()
        job_s, command_s = ours(root, job, count)
        used_ms = [1000 * used / count for used in (processor_s() - between, between - begun)]
    rounds = count / at_once
    overhead = (job_s - loop_s) / loop_s
    return Row(
        f"{count:,} oracle trials of {WORK_S + CHECK_S:.0f} s, {at_once} at once, beside a shell loop",
        f"{100 * overhead:.1f} % ({1000 * (job_s - loop_s) / rounds:.0f} ms a trial): {job_s:.1f} and {loop_s:.1f} s; "
        f"with the cluster {command_s:.1f} s; processor time {used_ms[0]:.0f} and {used_ms[1]:.0f} ms",
        f"≤{100 * TARGET:.0f} %",
        overhead <= TARGET,
        {"overhead": overhead, "job_s": job_s, "loop_s": loop_s, "command_s": command_s},
    )


def room() -> int:
    """Trials at once: most of each waits, so that several share a processor."""
    return 4 * (os.cpu_count() or 1)


def rows(quick: bool) -> list[Row]:
    return [measure(100 if quick else COUNT, room())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT, help="trials; a multiple of 10")
    parser.add_argument("--at-once", type=int, default=room(), help="trials at once")
    given = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    row = measure(given.count, given.at_once)
    print(f"{row.what}: {row.figure}  [{row.target}: {row.verdict}]")


if __name__ == "__main__":
    main()
