"""Training as a user meets it: kill anything, and the same command ends in the same bytes."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli
from cluster import Cluster
from rollout_worker.backends.tiny import make_tiny
from train_kills import COMMAND, COORDINATOR, QUICK, RANK, SNAPSHOT, STEP, UPLOAD, WORKER, Disturbed, Strike

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS, EVERY = 80, 4
ROWS = {
    "sft": [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(40)],
    "dpo": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in range(40)],
    "ipo": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in range(40)],
    "rm": [{"prompt": f"{n} is", "chosen": f" {n}", "rejected": " none" * (1 + n % 2)} for n in range(40)],
    "kto": [{"prompt": f"{n} is", "completion": f" {n}", "label": n % 3 > 0} for n in range(40)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout, so that the generators matter."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    return directory


def configure(cli: Cli, kind: str, model: Path, name: str = "out", **more: Any) -> str:
    (cli.directory / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    keys = {
        "base_model.uri": str(model), "dataset.path": f"{kind}.jsonl", "minibatch_size": 4, "gradient_accumulation": 2,
        "optimizer.lr": 1e-3, "optimizer.schedule": "cosine", "optimizer.warmup_steps": 3, "budget.max_steps": STEPS,
        "disable_dropout": False, "seed": 7,
    } | more  # fmt: skip
    lines = ["[algorithm]", f'kind = "{kind}"', f"[algorithm.{kind}]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    lines += ["[snapshots]", f"every_steps = {EVERY}", "keep_last = 1000", "[output]", f'dir = "{name}"']
    path = cli.directory / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def result(cli: Cli, name: str = "out") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What has to be the same: what the run ended in, and its metrics but for the time they took."""
    summary = json.loads((cli.directory / name / "summary.json").read_text())
    lines = [json.loads(line) for line in (cli.directory / name / "metrics.jsonl").read_text().splitlines()]
    kept = {key: summary[key] for key in ("state", "steps", "final_snapshot", "weights_hash", "fingerprint")}
    return kept, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def snapshots(cli: Cli, *options: str) -> dict[int, str]:
    """The id of all that was left after each segment: weights, optimiser, schedule, generators and position."""
    listed = cli.run("snapshot", "list", "--json", *options)
    assert listed.code == 0, listed
    found = {one["step"]: one["id"] for one in json.loads(listed.out)["snapshots"]}
    assert list(found) == list(range(EVERY, STEPS + 1, EVERY))
    return found


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


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_killed_anywhere_it_ends_in_the_same_bytes(killing: Cluster, cli: Cli, model: Path, kind: str) -> None:
    """A process that trains, its worker, the coordinator and the command, each in a phase of its own."""
    seed = f"{kind} 1"
    luck = random.Random(seed)
    victims = luck.sample([RANK, WORKER, COORDINATOR], 3)
    strikes = [Strike(victim, phase) for victim, phase in zip(victims, (STEP, SNAPSHOT, UPLOAD), strict=True)]
    luck.shuffle(strikes)
    calm = cli.start("train", kind, "--config", configure(cli, kind, model, "calm"))
    command = ("train", kind, "--config", configure(cli, kind, model), *killing.operator())
    disturbed = Disturbed(killing, cli, command, cli.directory / "out", luck)
    disturbed.run([*strikes, Strike(COMMAND, luck.choice([STEP, SNAPSHOT, UPLOAD]))])
    print(f"seed {seed}:", *disturbed.record, sep="\n  ")
    out, err = calm.communicate(timeout=300)
    assert calm.returncode == 0, (out, err)
    expected = result(cli, "calm")
    assert expected[0]["steps"] == STEPS and [line["step"] for line in expected[1]] == list(range(1, STEPS + 1))
    assert result(cli) == expected
    assert snapshots(cli, "--run", "out", *killing.operator()) == snapshots(cli, "--dir", "calm")
