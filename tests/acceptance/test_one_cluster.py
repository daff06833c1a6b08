"""Which cluster a command speaks to, and what it says while and when that cannot be reached."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, free_port

NEW_LEADER_S = 15.0


def knows(tls_dir: Path) -> list[str]:
    return json.loads((tls_dir / "join.json").read_text())["coordinator_addrs"]


@pytest.mark.slow
def test_one_address_is_enough_after_a_failover(cli: Cli, tmp_path: Path, postgres_url: str) -> None:
    """One client was told one address, the other joined (the command line of the README); the worker knew one too."""
    with Cluster(tmp_path / "nodes", postgres_url=postgres_url) as cluster:
        first = cluster.add_coordinator()
        first.wait_event("coordinator_ready")
        worker = cluster.add_worker(worker={"slots": 2})
        at = cluster.operator()
        assert cli.run("join", "--coordinator", cluster.join_address, "--token", cluster.token("operator")).code == 0
        worker.wait_event("worker_ready")
        second = cluster.add_coordinator()
        second.wait_event("coordinator_standby")
        cli.rows(60)
        backend = {"delay_ms": 400, "concurrency": 4}
        told = cli.config("told.toml", backend=backend, output={"dir": "told"})
        joined = cli.config("joined.toml", backend=backend, output={"dir": "joined"})
        clients = [
            cli.start("infer", "batch", "--config", str(told), *at),
            cli.start("infer", "batch", "--config", str(joined)),
        ]
        for output, process in zip(("told", "joined"), clients, strict=True):
            cli.wait_for_rows(4, process, output)
        homes = [Path(at[-1]), cli.directory / "data" / "tls", worker.directory / "data" / "tls"]
        until(lambda: all(knows(home) == cluster.addresses for home in homes), "every host to know both")
        first.kill()
        second.wait_event("coordinator_ready")
        began = time.monotonic()
        for process in clients:
            out, err = process.communicate(timeout=NEW_LEADER_S + 45)
            assert process.returncode == 0, (out, err)
        assert time.monotonic() - began < NEW_LEADER_S + 15  # what is left of the work takes some
        for output in ("told", "joined"):
            assert [row["n"] for row in cli.completions(output)] == list(range(60))
        asked = cli.run("run", "list", *at)  # the address it names is the one that is dead
        assert asked.code == 0, asked


def test_what_is_joined_is_where_commands_go(cli: Cli, tmp_path: Path) -> None:
    with Cluster(tmp_path / "nodes", transport={"cluster": "prod"}) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        address = cluster.addresses[0]
        token = cluster.token("operator")
        joined = cli.run("join", "--coordinator", cluster.join_address, "--token", token)
        assert joined.code == 0 and "context prod (" in joined.out
        cluster.add_worker().wait_event("worker_ready")
        cli.rows(3)
        config = str(cli.config())
        done = cli.run("infer", "batch", "--config", config)
        assert done.code == 0 and done.out.startswith(f'using cluster "prod" at {address} (joined; ./data/tls)\n'), done
        local = str(cli.config("local.toml", output={"dir": "alone"}))
        private = cli.run("infer", "batch", "--config", local, "--local", "--json")
        event = private.event("cluster")
        assert private.code == 0 and (event["private"], event["why"]) == ("alone/.rollout", "--local")
        # The run is where it was started, whatever is named now.
        (cli.directory / "alone" / "summary.json").unlink()
        again = cli.run("infer", "batch", "--config", local)
        assert again.out.startswith("using the private cluster in alone/.rollout (from the output directory)\n"), again
        (cli.directory / "out" / "summary.json").unlink()
        strayed = cli.run("infer", "batch", "--config", config, "--local")
        assert strayed.code == 2 and f'cluster "prod" at {address}' in strayed.err
        go_on = f"rollout infer batch --config {config} --tls-dir {cli.directory}/data/tls"  # which knows who leads now
        assert f": {go_on}\n" in strayed.err
        assert cli.run(*go_on.split()[1:]).code == 0
        (cli.directory / "out" / "summary.json").unlink()
        # A run that was deleted there.
        run_id = (cli.directory / "out" / "run-id").read_text().strip()
        assert cli.run("run", "delete", run_id).code == 0
        gone = cli.run("infer", "batch", "--config", config)
        assert gone.code == 2 and 'cluster "prod"' in gone.err and "deleted there" in gone.err
        # From anywhere, by its name; and another one by hand.
        elsewhere = Cli(tmp_path / "elsewhere", cli.env, cli.started)
        elsewhere.directory.mkdir()
        listed = elsewhere.run("run", "list")
        assert listed.code == 0 and listed.err == f'using cluster "prod" at {address} (from context prod)\n'
        made = elsewhere.run("context", "add", "spare", "--tls-dir", str(cli.directory / "data/tls"))
        assert made.code == 0
        assert elsewhere.run("context", "use", "spare").code == 0
        contexts = json.loads(elsewhere.run("context", "list", "--json").out)
        assert (contexts["current"], [c["name"] for c in contexts["contexts"]]) == ("spare", ["prod", "spare"])
        assert "(from context prod)" in elsewhere.run("workers", "--context", "prod").err
        assert elsewhere.run("context", "remove", "spare").code == 0
        alone = elsewhere.run("run", "list")  # those of this machine
        assert alone.code == 0 and str(cli.directory / "alone") in alone.out
        nowhere = elsewhere.run("workers")
        assert nowhere.code == 2 and "which cluster?" in nowhere.err
        unknown = elsewhere.run("run", "list", "--context", "nope")
        assert unknown.code == 2 and "known: prod" in unknown.err


@pytest.mark.slow
def test_a_private_run_is_looked_at_like_any_other(cli: Cli) -> None:
    cli.rows(100)
    config = str(cli.config(backend={"delay_ms": 800, "concurrency": 4}))
    inside = Cli(cli.directory / "out", cli.env, cli.started)
    process = cli.start("infer", "batch", "--config", config)
    cli.wait_for_rows(4, process)
    run_id = (inside.directory / "run-id").read_text().strip()

    def shown(*args: str) -> dict[str, Any]:
        done = inside.run("run", "show", run_id, "--json", *args)
        assert done.code == 0, done
        return json.loads(done.out)

    assert shown()["state"] == "running"
    workers = cli.run("workers", "--dir", "out", "--json")
    assert workers.code == 0 and len(json.loads(workers.out)["workers"]) == 1, workers
    assert cli.run("run", "pause", "out").code == 0  # the only output directory here
    until(lambda: shown()["state"] == "paused", "the pause")
    assert inside.run("run", "resume", "@last").code == 0
    following = inside.start("events", "@last", "--follow")
    assert following.stdout and following.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f": rollout infer batch --config {config}\n" in out
    rest, said = following.communicate(timeout=30)
    assert following.returncode == 0 and " stops: " in rest and "no command works there at present" in said, said
    # Nobody runs it any more.
    listed = inside.run("run", "list")
    assert listed.code == 0 and run_id in listed.out
    assert listed.err.splitlines() == [
        "using the private cluster in .rollout (from this directory)",
        "no command works there at present; starting its coordinator for the answer",
    ]
    assert inside.run("run", "kill", run_id, "--reason", "wrong model").code == 0
    killed = inside.run("run", "resume", run_id)
    assert killed.code == 2 and f"batch --config {config} --resume @last   (in {cli.directory})" in killed.err, killed
    again = cli.run("infer", "batch", "--config", config)
    assert again.code == 2 and "the cluster's own key" in again.err, again
    assert "wrong model" in again.err and f"rollout infer batch --config {config} --resume {run_id[-8:]}" in again.err
    goes_on = cli.start("infer", "batch", "--config", config, "--continue")
    cli.wait_for_rows(len(cli.completions()) + 1, goes_on)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an operator of a cluster that is not there any more."""
    root = tmp_path_factory.mktemp("gone")
    with Cluster(root) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        return Path(cluster.operator()[-1])


def test_a_coordinator_that_is_down_is_called_that_and_soon(cli: Cli, identity: Path) -> None:
    address = knows(identity)[0]
    process = cli.start("run", "list", "--tls-dir", str(identity))
    assert process.stderr is not None
    began = time.monotonic()
    lines = [process.stderr.readline(), process.stderr.readline()]
    assert lines[0] == f"asking {address} (joined; {identity})\n"
    why = f"{address} refuses connections: no coordinator listens there (yet), or the address is wrong"
    assert re.fullmatch(rf"{re.escape(why)}; trying again for \d s\n", lines[1]), lines
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - began < 30, err  # 5 s, and what a loaded machine adds
    assert err.startswith(f"error [unavailable]: {why}. Tried for "), err
    assert "start the coordinator" in err and "certificate" not in err
    cli.rows(1)
    done = cli.run("infer", "batch", "--config", str(cli.config()), "--tls-dir", str(identity))
    assert (
        done.code == 1 and f"error [unavailable]: {address} refuses connections" in done.err and "refuses" in done.out
    )


@pytest.mark.slow
def test_who_leads_is_said_or_that_nobody_does(cli: Cli, tmp_path: Path, postgres_url: str) -> None:
    """The standby alone is asked, while the one that led is gone and its lease is not over."""
    with Cluster(tmp_path / "nodes", postgres_url=postgres_url) as cluster:
        cluster.transport = {"coordinator_failure_timeout_ms": 60_000, "worker_self_fence_timeout_ms": 4000}
        first = cluster.add_coordinator()
        first.wait_event("coordinator_ready")
        second = cluster.add_coordinator()
        second.wait_event("coordinator_standby")
        at = cluster.operator()
        standby = cluster.addresses[1]
        followed = cli.run("run", "list", "--coordinator", standby, *at[-2:])
        assert followed.code == 0, followed
        first.kill()
        asked = cli.run("run", "list", "--coordinator", standby, "--coordinator", f"127.0.0.1:{free_port()}", *at[-2:])
        assert asked.code == 1, asked
        assert "error [unavailable]: nobody leads" in asked.err and f"{standby} is a standby" in asked.err
        assert f"{cluster.addresses[0]} refuses connections" in asked.err
        assert "This coordinator is not the leader" not in asked.err
