"""Training as a user meets it: kill anything, and the same command ends in the same bytes."""

from __future__ import annotations

import json
import os
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from cluster import Cluster
from rollout_worker.backends.tiny import make_tiny
from train_kills import COMMAND, COORDINATOR, PHASES, QUICK, RANK, VICTIMS, WORKER, Disturbed, Strike

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EVERY, STEPS = 4, 48


def rows_of(kind: str, numbers: range) -> list[dict[str, Any]]:
    if kind == "sft":
        return [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in numbers]
    if kind == "kto":
        return [{"prompt": f"{n} is", "completion": f" {n}", "label": n % 3 > 0} for n in numbers]
    return [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in numbers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout, so that the generators matter."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return directory


def configure(cli: Cli, kind: str, model: Path, name: str, steps: int = STEPS, more: str = "") -> str:
    for path, numbers in ((f"{kind}.jsonl", range(steps)), ("held.jsonl", range(1000, 1010))):
        (cli.directory / path).write_text("".join(json.dumps(row) + "\n" for row in rows_of(kind, numbers)))
    path = cli.directory / f"{name}.toml"
    path.write_text(f"""
[algorithm]
kind = "{kind}"
[algorithm.{kind}]
base_model.uri = "{model}"
dataset.path = "{kind}.jsonl"
eval_dataset.path = "held.jsonl"
minibatch_size = 4
gradient_accumulation = 2
optimizer = {{ lr = 1e-3, schedule = "cosine", warmup_steps = 3 }}
budget.max_steps = {steps}
disable_dropout = false
seed = 7
{more}
[snapshots]
every_steps = {EVERY}
keep_last = 1000
[output]
dir = "{name}"
[run]
max_worker_lost = 1000
""")
    return path.name


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(cli: Cli, name: str, *at: str) -> dict[str, Any]:
    """What has to be the same: everything but the seconds that steps took and the names of runs."""
    output = cli.directory / name
    summary = json.loads((output / "summary.json").read_text())
    metrics = [
        {key: value for key, value in line.items() if key != "seconds"} for line in lines(output / "metrics.jsonl")
    ]
    kept = ("state", "steps", "tokens", "final_snapshot", "weights_hash", "fingerprint")
    return {
        "summary": {key: summary[key] for key in kept},
        "metrics": metrics,
        "eval": lines(output / "eval.jsonl"),
        "report": json.loads((output / "data-report.json").read_text()),
        "snapshots": snapshots(cli, *at),
    }


def snapshots(cli: Cli, *options: str) -> dict[int, str]:
    """The id of all that was left after each segment: weights, optimiser, schedule, generators and position."""
    listed = cli.run("snapshot", "list", "--json", *options)
    assert listed.code == 0, listed
    return {one["step"]: one["id"] for one in json.loads(listed.out)["snapshots"]}


@pytest.fixture(scope="module")
def killing() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as root,
        Cluster(Path(root), transport=QUICK) as cluster,
    ):
        cluster.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker()
        for worker in cluster.workers:
            worker.wait_event("worker_ready")
        yield cluster


def check_killed(
    cluster: Cluster,
    cli: Cli,
    model: Path,
    kind: str,
    strikes: list[Strike],
    luck: random.Random,
    steps: int,
    more: str = "",
) -> Disturbed:
    """The same command undisturbed, in a cluster of its own, and struck, on `cluster`."""
    calm = cli.start("train", kind, "--config", configure(cli, kind, model, "calm", steps, more))
    command = ("train", kind, "--config", configure(cli, kind, model, "out", steps, more), *cluster.operator())
    disturbed = Disturbed(cluster, cli, command, luck)
    disturbed.run(strikes)
    out, err = calm.communicate(timeout=3000)
    assert calm.returncode == 0, (out, err)
    expected = result(cli, "calm", "--dir", "calm")
    assert result(cli, "out", "--run", "out", *cluster.operator()) == expected
    assert [line["step"] for line in expected["metrics"]] == list(range(1, steps + 1))
    assert [line["step"] for line in expected["eval"]] == list(range(EVERY, steps + 1, EVERY))
    assert list(expected["snapshots"]) == list(range(EVERY, steps + 1, EVERY))
    if (report := expected["report"]["dataset"])["sequences"] == report["rows"]:
        epochs = 16 if "devices = 2" in more else 8  # as many rows in a step, as many steps as rows
        assert expected["metrics"][-1]["num_tokens"] == report["tokens"] * epochs, "each row in each epoch"
    return disturbed


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_killed_anywhere_it_ends_in_the_same_bytes(killing: Cluster, cli: Cli, model: Path, kind: str) -> None:
    """A process that trains, its worker, the coordinator and the command, each in a phase of its own."""
    seed = f"{kind} 1"
    luck = random.Random(seed)
    victims = luck.sample([RANK, WORKER, COORDINATOR], 3)
    strikes = [Strike(victim, phase) for victim, phase in zip(victims, PHASES, strict=True)]
    luck.shuffle(strikes)
    disturbed = check_killed(killing, cli, model, kind, [*strikes, Strike(COMMAND, luck.choice(PHASES))], luck, STEPS)
    print(f"seed {seed}:", *disturbed.record, sep="\n  ")


KILLS = int(os.environ.get("ROLLOUT_TRAIN_KILLS", "50"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_killed_fifty_times_it_ends_in_the_same_bytes(killing: Cluster, cli: Cli, model: Path, kind: str) -> None:
    """Every pair of a victim and a phase, again and again. ROLLOUT_SEED repeats a run, ROLLOUT_TRAIN_KILLS says how many."""
    seed = os.environ.get("ROLLOUT_SEED") or secrets.token_hex(4)
    print(f"ROLLOUT_SEED={seed}")
    luck = random.Random(seed)
    pairs = [Strike(victim, phase) for victim in VICTIMS for phase in PHASES]
    strikes = [strike for _ in range(-(-KILLS // len(pairs))) for strike in luck.sample(pairs, len(pairs))][:KILLS]
    disturbed = check_killed(killing, cli, model, kind, strikes, luck, 16 * KILLS)
    print(*disturbed.record, sep="\n")
    hit = Counter(phase for found in disturbed.phases for phase in found)
    print(f"{kind}: {len(strikes)} kills, of which hit {dict(hit)}")
    assert set(hit) == set(PHASES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("rm", ""), ("ipo", ""), ("kto", ""), ("sft", "lora = { r = 4, dropout = 0.1 }"),
        ("dpo", "lora = { r = 4, dropout = 0.1 }"), ("kto", 'devices = 2\nstrategy = "ddp"'),
        ("sft", 'packing = { kind = "best_fit", max_seq_len = 32 }'),
    ],
    ids=["rm", "ipo", "kto", "sft LoRA", "dpo LoRA", "kto DDP", "sft packed"],
)  # fmt: skip
def test_the_others_killed_and_each_segment_verified(
    killing: Cluster, cli: Cli, model: Path, kind: str, more: str
) -> None:
    luck = random.Random(f"{kind} {more}")
    strikes = [Strike(victim, luck.choice(PHASES)) for victim in (RANK, WORKER, COORDINATOR)]
    check_killed(killing, cli, model, kind, strikes, luck, STEPS, more)
    again = cli.run("train", "verify", "out", "--all", "--json", *killing.operator(), timeout=600)
    assert again.code == 0, again
    assert (again.event("verified")["same"], again.event("verified")["different"]) == (STEPS // EVERY, [])
