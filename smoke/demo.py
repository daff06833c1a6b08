"""`make demo`: a few hundred prompts on a real engine while a worker and the coordinator are killed.

Makes a tiny model, starts a coordinator and three workers that join it by token, runs `rollout infer batch`, kills the
coordinator and then a worker in the middle, and shows that every row came out once and in order.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Cluster, binary, wait_until, write_toml

ROWS = 400
TOPICS = [
    "the sea",
    "a clock",
    "winter",
    "the night train",
    "a lighthouse",
    "rust",
    "tea",
    "an orchard",
    "maps",
    "rain",
]


def say(text: str) -> None:
    print(f"\033[1m--\033[0m {text}" if sys.stdout.isatty() else f"-- {text}", flush=True)


def committed(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> int:
    root = Path("demo-output").resolve()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    started = time.monotonic()

    say("making a tiny model (random weights, its own tokenizer and chat template)")
    subprocess.run([binary("rollout"), "model", "make-tiny", str(root / "model")], check=True)

    prompts = root / "prompts.jsonl"
    with prompts.open("w") as out:
        for n in range(ROWS):
            out.write(
                json.dumps({"id": f"row-{n:04d}", "prompt": f"Write line {n} about {TOPICS[n % len(TOPICS)]}:"}) + "\n"
            )
    config = write_toml(
        root / "batch.toml",
        {
            "model": {"uri": str(root / "model")},
            "backend": {"kind": "transformers", "max_num_seqs": 4},
            "sampling": {"temperature": 0.8, "max_tokens": 64, "seed": 7},
            "input": {"glob": str(prompts)},
            "output": {"dir": str(root / "out")},
        },
    )
    output = root / "out" / "completions.jsonl"

    with Cluster(root / "nodes") as cluster:
        say("starting a coordinator and three workers; each worker joins with its own token over mTLS")
        coordinator = cluster.add_coordinator()
        coordinator.wait_event("coordinator_ready")
        for _ in range(3):
            cluster.add_worker(worker={"slots": 1})
        for worker in cluster.workers:
            worker.wait_event("worker_ready")

        struck: list[str] = []

        def trouble() -> None:
            wait_until(lambda: committed(output) >= ROWS // 5, 200, "a fifth of the rows")
            say(f"kill -9 coordinator at {committed(output)} committed rows (restarted; the work in flight goes on)")
            coordinator.kill()
            coordinator.start()
            struck.append("coordinator")
            wait_until(lambda: committed(output) >= ROWS * 2 // 5, 200, "two fifths of the rows")
            say(f"kill -9 worker-1 at {committed(output)} committed rows (it comes back as a new incarnation)")
            cluster.workers[0].kill()
            cluster.workers[0].start()
            if committed(output) < ROWS:
                struck.append("worker-1")

        killer = threading.Thread(target=trouble, daemon=True)
        killer.start()
        command = [binary("rollout"), "infer", "batch", "--config", str(config), *cluster.operator()]
        say("rollout infer batch --config batch.toml --coordinator " + cluster.addresses[0])
        code = subprocess.run(command, check=False).returncode
        killer.join(timeout=5)
        if code != 0:
            say(f"`rollout infer batch` exited with {code}; logs are below {cluster.root}")
            return 1

    rows = [json.loads(line) for line in output.read_text().splitlines()]
    ids = [row["id"] for row in rows]
    expected = [f"row-{n:04d}" for n in range(ROWS)]
    say(f"{len(rows)} completions, in input order: {ids == expected}, none twice: {len(set(ids)) == len(ids)}")
    print("   a few of them (the weights are random, so this is noise; it is the same noise every time):")
    for row in rows[:3]:
        print(f"   {row['prompt']!r} -> {row['completion'][:60]!r}")
    say(f"killed midway: {' and '.join(struck) or 'nothing'}; {time.monotonic() - started:.0f} s in all")
    say(
        f"files: {output}, {output.with_name('errors.jsonl')}, {output.with_name('summary.json')}; logs: {cluster.root}"
    )
    return 0 if ids == expected and len(struck) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
