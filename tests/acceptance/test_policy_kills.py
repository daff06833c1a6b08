"""Reinforcement learning as a user meets it: kill anything in the midst of a step, and the same command ends in the same
bytes, from the samples that are there.

Rewards are where a test knows what a run is at: the function notes each call, and waits while a file says so.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, Node
from rollout.workloads.train.sampler import step_rows
from rollout.workloads.train.segment import timeless
from rollout_worker.backends.tiny import make_tiny
from train_kills import (
    COMMAND,
    COORDINATOR,
    DRAW,
    ENGINE,
    LEARN,
    QUICK,
    RANK,
    SNAPSHOT,
    UPLOAD,
    WORKER,
    Disturbed,
    Strike,
    draws,
    ranks,
    tree,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS, EVERY, PROMPTS, HELD = 8, 4, 4, 3
TRAINER, REWARD, GENERATOR, DRAIN, WEIGHTS = "trainer", "reward", "generator", "drain", "weights"
"""Victims, beside those of `train_kills`: the process that leads the training; the one that scores samples; the worker
that has it; the worker that trains, which is asked to leave; and the objects of published weights, in the store and on
the workers."""

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
random.Random(0).shuffle(ROWS)
REWARDS = """
import os, time

def judge(prompts, completions, answer, **columns):
    name = prompts[0][:3]
    with open("{marks}/calls", "a") as file:
        file.write(f"{{name}} {{os.getpid()}}\\n")
    while os.path.exists("{marks}/hold-" + name):
        time.sleep(0.01)
    {more}
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "small"
    make_tiny(directory)
    return directory


@dataclass
class Rig:
    """A run's directory and what its reward function notes."""

    cli: Cli
    name: str
    options: list[str] = field(default_factory=list[str])
    kind: str = "grpo"
    settings: str = ""
    steps: int = STEPS
    every: int = EVERY
    prompts: int = PROMPTS
    command: Any = None

    def __post_init__(self) -> None:
        self.directory = self.cli.directory / self.name
        self.marks = self.cli.directory / f".{self.name}"
        for path in (self.directory, self.marks):
            path.mkdir()

    def configure(self, model: Path, more: str = "") -> None:
        def write(name: str, rows: list[dict[str, Any]]) -> None:
            (self.directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

        write("prompts.jsonl", ROWS[HELD:])
        write("held.jsonl", ROWS[:HELD])
        (self.directory / "rewards.py").write_text(REWARDS.format(marks=self.marks, more=more))
        (self.directory / "train.toml").write_text(f"""
[algorithm]
kind = "{self.kind}"
[algorithm.{self.kind}]
base_model.uri = "{model}"
dataset.path = "prompts.jsonl"
eval_dataset.path = "held.jsonl"
num_generations = 4
prompts_per_step = {self.prompts}
max_completion_length = 8
max_length = 32
reward = ["rewards:judge"]
optimizer = {{ lr = 3e-3 }}
budget.max_steps = {self.steps}
device = "cpu"
seed = 7
{self.settings}
[snapshots]
every_steps = {self.every}
[run]
max_worker_lost = 100
[output]
dir = "out"
""")

    def start(self) -> Any:
        return Cli(self.directory, self.cli.env, self.cli.started).start(*self.arguments)

    @property
    def arguments(self) -> list[str]:
        return ["train", self.kind, "--config", "train.toml", *self.options]

    def run(self, *args: str) -> Any:
        return Cli(self.directory, self.cli.env, self.cli.started).run("train", *args, *self.options, timeout=300)

    def group(self, step: int, place: int = -1) -> str:
        """The prompt of a group, by step and place from 0. They are scored in the order of places."""
        rows = ROWS[HELD:]
        chosen = step_rows(len(rows), 7, step, self.prompts, self.steps * self.prompts)
        return rows[int(chosen[place])]["prompt"][:3]

    @property
    def calls(self) -> list[tuple[str, int]]:
        path = self.marks / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(line[:3], int(line[4:])) for line in lines]

    @property
    def run_id(self) -> str:
        path = self.directory / "out" / "run-id"
        return path.read_text().strip() if path.exists() else ""

    def hold(self, group: str) -> Path:
        path = self.marks / f"hold-{group}"
        path.touch()
        return path

    def scored_by(self, group: str) -> int:
        """The process that scored the group last; 0: none."""
        return next((pid for name, pid in reversed(self.calls) if name == group), 0)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "out" / name).read_text().splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "out" / "summary.json").read_text())

    def result(self) -> dict[str, Any]:
        """What has to be the same."""
        if self.command is not None:
            out, err = self.command.communicate(timeout=300)
            assert self.command.returncode == 0, (out, err)
            self.command = None
        summary = self.summary
        kept = ("state", "steps", "tokens", "final_snapshot", "weights_hash", "fingerprint", "tier", "final_reward")
        return {
            **{key: summary[key] for key in kept},
            "groups": summary["rollouts"]["generated"],
            "metrics": [timeless(line) for line in self.lines("metrics.jsonl")],
            **{name: (self.directory / "out" / name).read_bytes() for name in ("samples.jsonl", "eval.jsonl")},
        }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="rp-", ignore_cleanup_errors=True) as root,
        Cluster(Path(root), transport=QUICK) as cluster,
    ):
        cluster.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker()
        for worker in cluster.workers:
            worker.wait_event("worker_ready")
        yield cluster


# ---- victims


def strike(cluster: Cluster, rig: Rig, victims: tuple[str, ...], group: str, command: Any, leavers: list[Node]) -> Any:
    """Kill them, and start again what nobody else would; the command that is there then."""
    trainer = next(worker for worker in cluster.workers if ranks(worker))
    judge = psutil.Process(rig.scored_by(group))
    rank = ranks(trainer)[0]
    leader = rank.parent()
    assert leader is not None
    processes = {
        RANK: [rank],
        TRAINER: [leader],
        REWARD: [judge],
        ENGINE: [process for worker in cluster.workers for process in tree(worker) if draws(process)],
    }
    scorer = next(worker for worker in cluster.workers if judge in tree(worker))
    nodes = {WORKER: trainer, GENERATOR: scorer, COORDINATOR: cluster.coordinators[0]}
    for victim in victims:
        if victim == COMMAND:
            command.kill()
            command.communicate()
        elif victim == DRAIN:
            assert trainer.process is not None
            trainer.process.send_signal(signal.SIGTERM)
            trainer.wait_event("worker_draining")
            leavers.append(trainer)
        elif victim == WEIGHTS:
            held = {bytes(row[0]).hex() for row in ledger(cluster, _HELD, rig.run_id)}
            files = [path for path in cluster.root.rglob("*") if path.name in held]
            assert len(files) >= len(held) > 0
            for path in files:
                path.unlink()
        elif victim in nodes:
            nodes[victim].kill()
            nodes[victim].start()
        else:
            assert processes[victim], victim
            for process in processes[victim]:
                process.kill()
    return rig.start() if COMMAND in victims else command


def struck(cluster: Cluster, rig: Rig, strikes: list[tuple[int, tuple[str, ...]]]) -> None:
    """The run to its end, with all of these killed in the midst of a step: one group is being scored, all others that
    were asked for are done. (step from 0, victims) of each."""
    holds = {step: rig.hold(rig.group(step)) for step, _ in strikes}
    command, unfinished = rig.start(), set[tuple[int, int]]()
    for step, victims in strikes:
        group, leavers = rig.group(step), list[Node]()

        def held(group: str = group) -> bool:
            assert command.poll() is None, command.communicate()  # noqa: B023
            return bool(rig.scored_by(group)) and len(open_groups(cluster, rig)) == 1

        until(held, f"step {step}", 300)
        unfinished |= open_groups(cluster, rig)
        command = strike(cluster, rig, victims, group, command, leavers)
        holds[step].unlink()
        for leaver in leavers:
            until(lambda: not leaver.alive(), "the worker to leave")  # noqa: B023
            leaver.start()
    out, err = command.communicate(timeout=200)
    assert command.returncode == 0, (out, err)
    again = ledger(cluster, _AGAIN, rig.run_id)
    assert again <= unfinished, "what was finished is not drawn again"
    assert rig.summary["rollouts"]["regenerated"] == len(again)
    assert not ledger(cluster, _HELD, rig.run_id), "weights that no group needs"


_GROUPS = "FROM log JOIN run ON log.parent_log = run.root_log AND run.run_id = ?"
_OPEN = f"""SELECT item.log, item.seq {_GROUPS} JOIN item ON item.log = log.log
    WHERE NOT EXISTS (SELECT 1 FROM result WHERE result.log = item.log AND result.seq = item.seq)"""
_HELD = "SELECT object_id FROM kept JOIN log ON log.log = kept.log AND run_id = ? WHERE attempt = -1 AND let_go = 0"
_AGAIN = f"""SELECT attempt.log, attempt.seq {_GROUPS} JOIN attempt ON attempt.log = log.log
    WHERE attempt.ending IN ('failed', 'worker_lost')"""


def ledger(cluster: Cluster, query: str, run_id: str) -> set[Any]:
    path = cluster.coordinators[0].directory / "data" / "rollout.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return set(connection.execute(query, (run_id,)))


def open_groups(cluster: Cluster, rig: Rig) -> set[tuple[int, int]]:
    """(log, place) of those that are asked for and not finished."""
    return ledger(cluster, _OPEN, rig.run_id)


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    """Runs that nobody disturbs, each with one worker in a cluster of its own, while others go on."""
    found: dict[str, Rig] = {}

    def start(name: str, **configured: Any) -> Rig:
        if name not in found:
            root = tmp_path_factory.mktemp("calm")
            env = {"XDG_STATE_HOME": str(root / ".state"), "XDG_CONFIG_HOME": str(root / ".config")}
            rig = found[name] = Rig(Cli(root, env), "calm", **configured)
            rig.configure(model)
            rig.command = rig.start()
        return found[name]

    yield start
    for rig in found.values():
        for process in rig.cli.started:
            process.kill()
            process.communicate()


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {}, "grpo lag 1": {"settings": "lag = 1"},
    "ppo": {"kind": "ppo", "settings": "num_iterations = 2\nnum_minibatches = 2"},
}  # fmt: skip


SMALL: dict[str, Any] = {"steps": 4, "every": 2, "prompts": 2}
QUICKLY = [
    pytest.param("grpo", [(2, (RANK, ENGINE, TRAINER))], id="grpo"),
    pytest.param("grpo", [(2, (WEIGHTS, RANK, ENGINE))], id="weights", marks=pytest.mark.slow),
    pytest.param("grpo lag 1", [(2, (COORDINATOR, COMMAND, WORKER))], id="grpo lag 1", marks=pytest.mark.slow),
    pytest.param("ppo", [(2, (TRAINER,))], id="ppo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("variant", "strikes"), QUICKLY)
def test_killed_in_the_midst_of_steps_it_ends_in_the_same_bytes_and_draws_nothing_twice(
    calm: Callable[..., Rig], cluster: Cluster, cli: Cli, model: Path, variant: str, strikes: Any
) -> None:
    calm(f"{variant} small", **SMALL, **VARIANTS[variant])
    rig = Rig(cli, "struck", cluster.operator(), **SMALL, **VARIANTS[variant])
    rig.configure(model)
    struck(cluster, rig, strikes)
    assert rig.result() == calm(f"{variant} small").result()


PAIRS = [
    *(Strike(victim, LEARN) for victim in (RANK, WORKER, COORDINATOR)),
    *(Strike(victim, DRAW) for victim in (ENGINE, WORKER, COORDINATOR)),
    *(Strike(victim, phase) for phase in (SNAPSHOT, UPLOAD) for victim in (RANK, WORKER, COORDINATOR)),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_while_it_draws_learns_writes_or_stores(
    calm: Callable[..., Rig], cluster: Cluster, cli: Cli, model: Path, variant: str
) -> None:
    """Every pair of a victim and a phase. ROLLOUT_SEED repeats a run."""
    seed = os.environ.get("ROLLOUT_SEED") or secrets.token_hex(4)
    luck, size = random.Random(seed), {"steps": 40, "every": 1, "prompts": 2}
    undisturbed = calm(f"{variant} long", **size, **VARIANTS[variant])
    rig = Rig(cli, "struck", cluster.operator(), **size, **VARIANTS[variant])
    rig.configure(model)
    here = Cli(rig.directory, cli.env, cli.started)
    disturbed = Disturbed(cluster, here, rig.arguments, luck, patience_s=900)
    disturbed.run(luck.sample(PAIRS, len(PAIRS)))
    print(f"ROLLOUT_SEED={seed}: {variant}, {len(disturbed.record)} kills", *disturbed.record, sep="\n  ")
    assert rig.result() == undisturbed.result()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_after_the_other_handed_over_verified_and_forked(
    calm: Callable[..., Rig], cluster: Cluster, cli: Cli, model: Path, variant: str
) -> None:
    undisturbed = calm(variant, **VARIANTS[variant])
    rig = Rig(cli, "struck", cluster.operator(), **VARIANTS[variant])
    rig.configure(model)
    victims = [(DRAIN,), (TRAINER, REWARD), (COMMAND, GENERATOR), (COORDINATOR, WORKER)]
    struck(cluster, rig, list(zip(range(0, STEPS, 2), victims, strict=True)))
    expected = undisturbed.result()
    assert rig.result() == expected
    logs = "".join(worker.log.read_text() for worker in cluster.workers)
    assert "handed_over" in logs and "hand_over_taken" in logs
    again = rig.run("verify", rig.run_id, "--all", "--json")
    assert again.code == 0, again
    assert (again.event("verified")["same"], again.event("verified")["different"]) == (STEPS // EVERY, [])
    before = rig.run_id
    (rig.directory / "out").rename(rig.directory / "first")
    forked = rig.run("fork", before, "--step", str(EVERY), "--config", "train.toml")
    assert forked.code == 0, forked
    end = rig.result()
    assert {name: end[name] for name in ("final_snapshot", "weights_hash")} == {
        name: expected[name] for name in ("final_snapshot", "weights_hash")
    }
    assert end["metrics"] == expected["metrics"][EVERY:]


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "versions"), [(0, 0), (1, STEPS // EVERY)])
def test_weights_that_no_group_needs_are_deleted(
    cluster: Cluster, cli: Cli, model: Path, lag: int, versions: int
) -> None:
    """Those of the last `lag` versions of each segment stay, for the next one or for a fork."""

    def stored() -> set[str]:
        found = (path for path in (cluster.coordinators[0].directory / "data").rglob("*") if len(path.name) == 64)
        return {path.name for path in found if path.read_bytes().startswith(b'{"tensors":')}

    before = stored()
    rig = Rig(cli, "kept", cluster.operator(), settings=f"lag = {lag}")
    rig.configure(model)
    (command := rig.start()).communicate(timeout=200)
    assert command.returncode == 0
    until(lambda: len(stored() - before) == versions, "weights to be deleted", 60)


@pytest.mark.slow
def test_ctrl_c_in_the_midst_of_a_step_ends_cleanly_and_the_same_command_goes_on(
    calm: Callable[..., Rig], cli: Cli, model: Path
) -> None:
    rig = Rig(cli, "stopped")
    rig.configure(model)
    hold, command = rig.hold(rig.group(2)), rig.start()
    until(lambda: bool(rig.scored_by(rig.group(2))), "step 3", 120)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=90)
    assert command.returncode == 130 and "continue with: rollout train grpo" in out, (out, err)
    assert not cli.left_behind()
    hold.unlink()
    out, err = (command := rig.start()).communicate(timeout=200)
    assert command.returncode == 0, (out, err)
    assert rig.result() == calm("grpo").result()


FAULTS = """
    if name == {raises!r}:
        raise ValueError("no such answer")
    while name == {hangs!r}:
        time.sleep(0.1)
    if name == {dies!r}:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "drop_group", "zero"])
def test_a_reward_that_raises_hangs_or_dies(cli: Cli, model: Path, policy: str) -> None:
    """Each is of a group of its own, in the second step."""
    rig = Rig(cli, "faulty", settings=f'on_reward_error = "{policy}"\nreward_timeout = 2')
    names = {name: rig.group(1, place) for place, name in enumerate(("raises", "hangs", "dies"))}
    rig.configure(model, FAULTS.format(**names))
    out, err = (command := rig.start()).communicate(timeout=250)
    if policy == "stop":
        assert command.returncode == 1, (out, err)
        error = json.loads((rig.directory / "out" / "errors.jsonl").read_text().splitlines()[0])
        assert error["code"] == "reward_failed" and "rewards:judge" in error["message"], error
        assert "step 2, prompt of row" in error["message"], error
        return
    assert command.returncode == 0, (out, err)
    samples = [line for line in rig.lines("samples.jsonl") if line["step"] == 2]
    faulty = [line for line in samples if line["prompt"][:3] in names.values()]
    dropped = policy == "drop_group"
    assert len(samples) == 4 + len(faulty) and len(faulty) == (0 if dropped else 12)
    assert all(line["reward"] == 0 for line in faulty)
    causes = rig.summary["rollouts"]["dropped"]
    assert sum(causes.values()) == (3 if dropped else 0) and len(causes) == sum(causes.values()), causes
