"""`make demo`: a tiny model learns to say words backwards, while the worker and the coordinator that do it are killed.

Starts a coordinator and two workers that join it by token, and trains on them. The worker that trains is killed, the
other goes on from the last snapshot; the coordinator is killed and comes back. The same training runs undisturbed on a
private cluster beside it, and both must end in the same weights. Words that were held out are asked before and after,
through `rollout infer batch`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
import tiny_task
from cluster import Cluster, Node, binary, wait_until

STEPS = 600
WORKER_AT, COORDINATOR_AT = STEPS * 3 // 10, STEPS * 6 // 10
LEARNT, GUESSED = 0.95, 0.05
"""Shares of held-out questions that must be right after training, and at most before."""

TRAIN = """\
[algorithm]
kind = "sft"

[algorithm.sft]
base_model.uri = "{root}/words/model"
dataset.path = "{root}/words/train.jsonl"
minibatch_size = 32
optimizer = {{ lr = 3e-3, betas = [0.9, 0.99], schedule = "cosine", warmup_steps = 50 }}
budget.max_steps = {steps}
seed = 7

[snapshots]
every_steps = 50                  # a segment: what a kill costs at most

[output]
dir = "{root}/{name}"
"""
ASK = """\
[model]
uri = "{uri}"

[backend]
kind = "transformers"
max_num_seqs = 64

[sampling]
temperature = 0
max_tokens = 12

[input]
glob = "{root}/words/questions.jsonl"

[output]
dir = "{root}/{name}"
"""


def say(text: str) -> None:
    print(f"\033[1m--\033[0m {text}" if sys.stdout.isatty() else f"-- {text}", flush=True)


class Command:
    """A `rollout` command that runs beside others: what it prints goes to a file."""

    def __init__(
        self,
        root: Path,
        name: str,
        *words: str,
        program: str = "",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log = root / f"{name}.log"
        self._out: IO[bytes] = self.log.open("wb")
        self.process = subprocess.Popen(
            [program or binary("rollout"), *words],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=os.environ | (env or {}),
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ended_well(self) -> None:
        """RuntimeError, with what it printed last."""
        code = self.process.wait()
        self._out.close()
        if code:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise RuntimeError(f"{' '.join(map(str, self.process.args[1:4]))} exited with {code}:\n{tail}")  # type: ignore[index]

    def end(self, sig: int = signal.SIGTERM) -> None:
        if self.running:
            self.process.send_signal(sig)
            self.process.wait()
        self._out.close()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def ranks(worker: Node) -> list[psutil.Process]:
    """Processes of training that are below it."""
    if worker.process is None or not worker.alive():
        return []
    try:
        below = psutil.Process(worker.process.pid).children(recursive=True)
        return [child for child in below if "rollout_worker.backends.training.rank" in child.cmdline()]
    except psutil.Error:
        return []  # one ended meanwhile


class Demo:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.began = time.monotonic()
        self.commands: list[Command] = []
        self._told = 0.0

    def run(self) -> bool:
        with Cluster(self.root / "nodes") as cluster:
            try:
                return self._run(cluster)
            finally:
                for command in self.commands:
                    command.end()

    def _run(self, cluster: Cluster) -> bool:
        root = self.root
        say("starting a coordinator and two workers; each joins with its own token over mTLS")
        cluster.add_coordinator()
        parameters = self._prepare()
        cluster.coordinators[0].wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker(worker={"slots": 1})
        operator = cluster.operator()

        say(f"rollout train sft --config train.toml  ({parameters:,} random weights, {STEPS:,} steps)")
        train = self._start("train", "train", "sft", "--config", str(root / "train.toml"), *operator)
        say("the same on a private cluster beside it, which nobody will disturb")
        calm = self._start("undisturbed", "train", "sft", "--config", str(root / "undisturbed.toml"), "--local")
        before = self._ask("before", str(root / "words" / "model"), operator)

        self._until(lambda: self._at("train") >= WORKER_AT, train, calm)
        victim = next((worker for worker in cluster.workers if ranks(worker)), None)
        if victim is None:
            raise RuntimeError(f"at step {self._at('train')} no worker trains")
        say(f"kill -9 {victim.name}, which trains, after step {self._at('train')}: the other goes on from a snapshot")
        victim.kill()
        self._until(lambda: self._at("train") >= COORDINATOR_AT, train, calm)
        say(f"kill -9 coordinator-1 after step {self._at('train')}, and start it again")
        cluster.coordinators[0].kill()
        struck = self._at("train") < STEPS
        cluster.coordinators[0].start()
        self._until(lambda: not train.running, train, calm)
        train.ended_well()
        before.ended_well()

        summary = json.loads((root / "train" / "summary.json").read_text())
        say(f'rollout infer batch with uri = "run:{summary["run_id"][-8:]}": words that were held out')
        after = self._ask("after", f"run:{summary['run_id']}", operator)
        self._until(lambda: not after.running and not calm.running, after, calm)
        after.ended_well()
        calm.ended_well()
        return self._report(summary, struck)

    def _prepare(self) -> int:
        root = self.root
        parameters = tiny_task.write_all(root / "words", dropout=0.05)
        for name in ("train", "undisturbed"):
            (root / f"{name}.toml").write_text(TRAIN.format(root=root, name=name, steps=STEPS))
        return parameters

    def _ask(self, name: str, uri: str, operator: list[str]) -> Command:
        config = self.root / f"{name}.toml"
        config.write_text(ASK.format(root=self.root, name=name, uri=uri))
        return self._start(name, "infer", "batch", "--config", str(config), *operator)

    def _start(self, name: str, *words: str) -> Command:
        command = Command(self.root, name, *words)
        self.commands.append(command)
        return command

    def _at(self, name: str) -> int:
        """Steps that are durable."""
        path = self.root / name / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def _until(self, condition: Callable[[], bool], *commands: Command) -> None:
        """Says how far both trainings are, now and then. RuntimeError: a command failed."""

        def there() -> bool:
            for command in commands:
                if command.process.poll():
                    command.ended_well()
            if time.monotonic() - self._told > 4:
                self._told = time.monotonic()
                self._progress()
            return condition()

        wait_until(there, 300, "training")

    def _progress(self) -> None:
        found, calm = read_metrics(self.root / "train"), self._at("undisturbed")
        if not found:
            text = "engines are starting"
        elif found[-1]["step"] == STEPS:
            text = "an engine starts and answers"
        else:
            text = f"step {found[-1]['step']} of {STEPS}, loss {found[-1]['loss']:.3f}"
        beside = f"undisturbed: step {calm}" if calm < STEPS else "undisturbed: done"
        print(f"   {time.monotonic() - self.began:3.0f} s: {text}; {beside}", flush=True)

    def _report(self, summary: dict[str, Any], struck: bool) -> bool:
        root = self.root
        calm = json.loads((root / "undisturbed" / "summary.json").read_text())
        lost = summary["attempts"]["worker_lost"]
        (wrong, _), (right, asked) = (
            tiny_task.right_answers(root / n / "completions.jsonl") for n in ("before", "after")
        )
        metrics = [[{**line, "seconds": 0} for line in read_metrics(root / name)] for name in ("train", "undisturbed")]
        claims = {
            f"right before training: {wrong} of {asked} ({wrong / asked:.1%})": wrong <= GUESSED * asked,
            f"right after training: {right} of {asked} ({right / asked:.1%})": right >= LEARNT * asked,
            f"killed while it trained: a worker (segments lost and trained again: {lost}) and the coordinator": (
                lost > 0 and struck
            ),
            f"weights: blake3 {summary['weights_hash'][:16]}, undisturbed {calm['weights_hash'][:16]}": (
                summary["weights_hash"] == calm["weights_hash"]
            ),
            f"snapshot: {summary['final_snapshot'][:16]}, undisturbed {calm['final_snapshot'][:16]}": (
                summary["final_snapshot"] == calm["final_snapshot"]
            ),
            f"metrics of {len(metrics[0])} steps are those of the undisturbed run": (
                metrics[0] == metrics[1] and len(metrics[0]) == STEPS
            ),
        }
        say(f"results, after {time.monotonic() - self.began:.0f} s:")
        for claim, holds in claims.items():
            print(f"   {'ok   ' if holds else 'WRONG'} {claim}")
        shown = os.path.relpath(root)
        say(
            f"files: {shown}/train/ (metrics.jsonl, curves.png, summary.json), {shown}/undisturbed/, {shown}/after/completions.jsonl"
        )
        return all(claims.values())


def program(name: str, begin: Callable[[Path], bool]) -> int:
    """The exit code of `begin`, which gets an empty directory for what its programs print and log."""
    root = Path(f"{name}-output").resolve()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    try:
        return 0 if begin(root) else 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (RuntimeError, TimeoutError) as error:
        say(f"the {name} failed: {error}")
        say(f"what its programs printed and logged is in {os.path.relpath(root)}")
        return 1


if __name__ == "__main__":
    sys.exit(program("demo", lambda root: Demo(root).run()))
