"""`rollout serve` of models that training runs make."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx2
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster
from rollout_worker.backends.tiny import make_tiny
from test_serve import configure, served, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_that_goes_on_is_followed_and_no_request_is_dropped(cli: Cli, tmp_path: Path) -> None:
    make_tiny(cli.directory / "tiny")
    train(cli)
    with Cluster(tmp_path / ".nodes") as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        cluster.add_worker(worker={"slots": 4, "max_engines": 4}).wait_event("worker_ready")
        at = cluster.operator()
        training = cli.start("train", "sft", "--config", "sft.toml", *at)
        until(lambda: '"sft"' in cli.run("run", "list", "--json", *at).out, "the run")
        follow(cli, "run:sft")
        with served(cli, *at) as (url, process), httpx2.Client(timeout=60) as client:
            models: dict[str, None] = {}
            while len(models) < 3:
                answer = client.post(f"{url}/completions", json={"prompt": "a", "max_tokens": 8})
                assert answer.status_code == 200, answer.text
                models[answer.headers["x-rollout-model"]] = None
                assert training.poll() is None, training.communicate()
            switched = [wait_for(process, "switched")["model"] for _ in range(2)]
            assert switched == list(models)[1:]


def test_ctrl_c_ends_the_wait_for_a_first_snapshot(cli: Cli, tmp_path: Path) -> None:
    make_tiny(cli.directory / "tiny")
    train(cli)
    with Cluster(tmp_path / ".nodes") as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        at = cluster.operator()
        assert cli.run("train", "sft", "--config", "sft.toml", "--detach", *at).code == 0
        follow(cli, "run:sft")
        server = cli.start("serve", "--config", "serve.toml", *at, together=True)
        assert server.stdout is not None
        assert any("no snapshot yet" in line for line in server.stdout)
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        assert cli.run("run", "kill", "@last", *at).code == 0
        assert cli.run("serve", "--config", "serve.toml", *at).code == 2


def train(cli: Cli) -> None:
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}"} for n in range(20)]
    (cli.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cli.directory / "sft.toml").write_text("""
[algorithm]
kind = "sft"
[algorithm.sft]
base_model.uri = "tiny"
dataset.path = "rows.jsonl"
minibatch_size = 4
optimizer.lr = 1e-3
budget.max_steps = 100_000
[snapshots]
every_steps = 20
[output]
dir = "sft"
""")


def follow(cli: Cli, uri: str) -> None:
    configure(cli, uri)
    path = cli.directory / "serve.toml"
    path.write_text(path.read_text().replace(f'uri = "{uri}"', f'uri = "{uri}"\nfollow = true'))
