"""`make recipe`: from rows to a served, measured model on one cluster, of which something is killed in each stage.

Copies docs/examples/recipe, makes a tiny model with random weights and its rows, and starts a coordinator and two workers.
Then it runs the commands of docs/recipe.md one after another: `train sft`, `train grpo`, `experiment run`, `report`,
`serve`. `--short` trains for fewer steps and asks fewer tasks, for CI.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
import tiny_task
from cluster import Cluster, Node, free_port, wait_until
from demo import Command, program, ranks, read_metrics, say

FILES = Path(__file__).resolve().parents[1] / "docs" / "examples" / "recipe"
TRANSPORT = {
    "heartbeat_interval_ms": 250,
    "worker_self_fence_timeout_ms": 2000,
    "coordinator_failure_timeout_ms": 2500,
}
"""A dead worker is noticed sooner than by default."""
REPLAYS = "rollout_serve_replays_total"
STAGE_S = 240.0
TAUGHT = 0.5
"""Share of held-out tasks that must be right after grpo. With random weights none is."""


@dataclass(frozen=True, slots=True)
class Size:
    """`rounds`: how often the served model is asked every task."""

    sft_steps: int
    grpo_steps: int
    tasks: int
    rounds: int


FULL = Size(sft_steps=200, grpo_steps=40, tasks=60, rounds=20)
SHORT = Size(sft_steps=160, grpo_steps=16, tasks=20, rounds=10)


class Recipe:
    def __init__(self, root: Path, size: Size) -> None:
        self.root = root
        self.size = size
        self.commands: list[Command] = []
        self.claims: dict[str, bool] = {}

    def run(self) -> bool:
        began = time.monotonic()
        try:
            with Cluster(self.root / "nodes", transport=TRANSPORT) as cluster:
                try:
                    self._run(cluster)
                finally:
                    for command in self.commands:
                        command.end()
        finally:
            say(f"results, after {time.monotonic() - began:.0f} s:")
            for claim, holds in self.claims.items():
                print(f"   {'ok   ' if holds else 'WRONG'} {claim}")
        return all(self.claims.values())

    def _run(self, cluster: Cluster) -> None:
        self.cluster = cluster
        coordinator = cluster.add_coordinator()
        stages: dict[str, Callable[[], str]] = {
            "python smoke/tiny_task.py --recipe data": self.data,
            "rollout train sft --config sft.toml": self.sft,
            "rollout train grpo --config grpo.toml": self.grpo,
            "rollout experiment run experiment.yaml": self.experiment,
            "rollout report compare": self.report,
            "rollout serve --config serve.toml": self.serve,
        }
        for name, stage in stages.items():
            began = time.monotonic()
            told = stage()
            say(f"{name}: {told} ({time.monotonic() - began:.0f} s)")
            if stage == self.data:
                coordinator.wait_event("coordinator_ready")
                for _ in range(2):
                    cluster.add_worker(worker={"slots": 1, "max_engines": 3})
                self.operator = cluster.operator()

    def data(self) -> str:
        """The files and the rows, with this size's numbers."""
        shutil.copytree(FILES, self.root, dirs_exist_ok=True)
        parameters = tiny_task.write_recipe(self.root / "data", tasks=self.size.tasks)
        self._set("sft.toml", "budget.max_steps", self.size.sft_steps)
        self._set("grpo.toml", "budget.max_steps", self.size.grpo_steps)
        return f"{parameters:,} random weights, 8,000 demonstrations, half of them wrong; {self.size.tasks} tasks"

    def sft(self) -> str:
        """The trainer is killed: its worker starts another, from the last snapshot."""
        train = self._start("sft", "train", "sft", "--config", "sft.toml")
        victim = self._strike(train, lambda: self._trainer("sft", at=self.size.sft_steps // 4))
        victim.kill()
        self._ended(train)
        return f"{self._curve('sft', 'loss')}; kill -9 of the trainer, {self._again('sft', 'retried')}"

    def grpo(self) -> str:
        """The worker that trains and draws is killed: the other one goes on from the last snapshot."""
        train = self._start("grpo", "train", "grpo", "--config", "grpo.toml")
        victim = self._strike(train, lambda: self._trainer("grpo", at=self.size.grpo_steps // 3))
        worker = next(node for node in self.cluster.workers if node.process and node.process.pid in parents(victim))
        worker.kill()
        self._ended(train)
        worker.start()
        return f"{self._curve('grpo', 'reward')}; kill -9 of {worker.name}, {self._again('grpo', 'worker_lost')}"

    def experiment(self) -> str:
        """The command is killed; the same command goes on."""
        words = ("experiment", "run", "experiment.yaml")
        facts = self.root / ".lab" / "runs" / "compare" / "facts" / "trials.jsonl"
        command = self._start("experiment", *words)
        self._until(lambda: lines(facts) >= self.size.tasks, command, f"{self.size.tasks} trials")
        command.end(signal.SIGKILL)
        committed = lines(facts)
        self._ended(self._start("experiment-again", *words))
        said = self._ended(self._start("analyze", "experiment", "analyze", "compare", "--json", cluster=False))
        found = json.loads(said)
        rates = {one["variant_id"]: one["pass_rate"] for one in found["variants"]}
        grpo = next(one for one in found["comparisons"] if (one["measure"], one["variant_id"]) == ("pass_rate", "grpo"))
        told = f"{grpo['difference']:+.1%} [{grpo['low']:+.1%}, {grpo['high']:+.1%}]"
        self.claims |= {
            f"the trained model is better than the base: {told} of the tasks": grpo["verdict"] == "better",
            f"right after grpo: {rates['grpo']['mean']:.1%}": rates["grpo"]["mean"] >= TAUGHT,
            f"grpo did no harm: {rates['sft']['mean']:.1%} after sft": rates["grpo"]["mean"] >= rates["sft"]["mean"],
            f"every trial is in the facts once: {lines(facts)}": lines(facts) == 3 * self.size.tasks,
        }
        text = ", ".join(f"{n} {r['mean']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" for n, r in rates.items())
        return f"{text}; kill -9 of the command after {committed} of {3 * self.size.tasks} trials"

    def report(self) -> str:
        """The coordinator is killed; the command waits until it is back."""
        coordinator = self.cluster.coordinators[0]
        coordinator.kill()
        command = self._start("report", "report", "compare", "--output", "report.html")
        time.sleep(1)
        coordinator.start()
        self._ended(command)
        page = (self.root / "report.html").read_text()
        self.claims["the report shows the variants"] = all(name in page for name in ("base", "sft", "grpo"))
        return f"report.html, {len(page) // 1024:,} KiB; kill -9 of the coordinator before it answered"

    def serve(self) -> str:
        """The engine that answers is killed: its requests go on at another."""
        address = f"127.0.0.1:{free_port()}"
        self._set("serve.toml", "listen_addr", f'"{address}"')
        server = self._start("serve", "serve", "--config", "serve.toml")
        self._until(lambda: fetch(f"http://{address}/health") is not None, server, "the first generation")
        env = {"OPENAI_BASE_URL": f"http://{address}/v1", "OPENAI_API_KEY": "none"}
        words = ("client.py", str(self.size.rounds))
        client = Command(self.root, "client", *words, program=sys.executable, cwd=self.root, env=env)
        self.commands.append(client)
        asked = self.size.tasks * self.size.rounds
        self._until(lambda: lines(client.log) >= asked // 4, client, f"{asked // 4} answers", server)
        busiest = self._busiest()
        busiest.kill()
        answered = lines(client.log)
        right = json.loads(self._ended(client).splitlines()[-1])
        metrics = fetch(f"http://{address}/metrics") or ""
        replays = next((int(float(line.split()[1])) for line in metrics.splitlines() if line.startswith(REPLAYS)), 0)
        server.end(signal.SIGINT)
        self.claims |= {
            f"every request was answered: {right['asked']} of {asked}, by the openai client": right["asked"] == asked,
            f"right answers of the served model: {right['right'] / asked:.1%}": right["right"] >= TAUGHT * asked,
            f"requests of the killed engine went on elsewhere: {replays}": replays > 0,
            f"rollout serve ended with {server.process.returncode}": server.process.returncode in (0, 130),
        }
        return f"{right['right']} of {asked} answers right; kill -9 of the engine after {answered} answers"

    def _set(self, name: str, key: str, value: object) -> None:
        path = self.root / name
        found = [f"{key} = {value}" if line.startswith(key) else line for line in path.read_text().splitlines()]
        path.write_text("\n".join(found) + "\n")

    def _start(self, log: str, *words: str, cluster: bool = True) -> Command:
        # Whoever runs this may have runs of the same names.
        env = {name: str(self.root / "nodes") for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME")}
        command = Command(self.root, log, *words, *(self.operator if cluster else ()), cwd=self.root, env=env)
        self.commands.append(command)
        return command

    def _until(self, condition: Callable[[], bool], command: Command, what: str, *others: Command) -> None:
        """RuntimeError: one of the commands ended before."""

        def there() -> bool:
            if condition():
                return True
            for one in (*others, command):
                if not one.running:
                    one.ended_well()
                    raise RuntimeError(f"{one.log.stem} ended before {what}")
            return False

        wait_until(there, STAGE_S, what)

    def _strike(self, command: Command, find: Callable[[], psutil.Process | None]) -> psutil.Process:
        found: list[psutil.Process] = []

        def there() -> bool:
            found.extend(one for one in [find()] if one is not None)
            return bool(found)

        self._until(there, command, "the moment of the kill")
        return found[0]

    def _ended(self, command: Command) -> str:
        """What it printed. RuntimeError: it failed."""
        wait_until(lambda: not command.running, STAGE_S, f"the end of {command.log.stem}")
        command.ended_well()
        return command.log.read_text()

    def _trainer(self, name: str, at: int) -> psutil.Process | None:
        """From step `at` on, while there is more to do."""
        if len(read_metrics(self.root / name)) < at:
            return None
        return next((rank for worker in self.cluster.workers for rank in ranks(worker)), None)

    def _busiest(self) -> psutil.Process:
        """The engine that works most at present."""
        found = {engine: spent(engine) for worker in self.cluster.workers for engine in engines(worker)}
        time.sleep(0.5)
        return max(found, key=lambda engine: spent(engine) - found[engine])

    def _curve(self, name: str, metric: str) -> str:
        found = read_metrics(self.root / name)
        return f"{len(found)} steps, {metric} {found[0][metric]:.3f} at first, {found[-1][metric]:.3f} at the end"

    def _again(self, name: str, cause: str) -> str:
        tries = json.loads((self.root / name / "summary.json").read_text())["attempts"]
        self.claims[f"{name}: segments that were trained again: {tries[cause]}"] = tries[cause] > 0
        return f"segments trained again: {tries[cause]}"


def parents(process: psutil.Process) -> set[int]:
    return {one.pid for one in process.parents()}


def engines(worker: Node) -> list[psutil.Process]:
    """Processes of the worker that hold a model to generate with."""
    if worker.process is None or not worker.alive():
        return []
    found: list[psutil.Process] = []
    for child in psutil.Process(worker.process.pid).children(recursive=True):
        try:
            maps = Path(f"/proc/{child.pid}/maps").read_text()
            if "rollout_worker.processes.runner" in child.cmdline() and "libtorch" in maps:
                found.append(child)
        except (psutil.Error, OSError):
            continue  # it ended meanwhile
    return found


def spent(process: psutil.Process) -> float:
    """CPU time, in seconds."""
    times = process.cpu_times()
    return times.user + times.system


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def fetch(url: str) -> str | None:
    """What is there; None: nobody answers, or with an error."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    sizes = SHORT if args.short else FULL
    return program("recipe", lambda root: Recipe(root, sizes).run())


if __name__ == "__main__":
    sys.exit(main())
