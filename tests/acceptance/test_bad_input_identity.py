"""Who is not let in, and what that person reads: tokens, other clusters, expired and revoked hosts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import prefork
import pytest
from acceptance_cli import Cli, Finished, until
from cluster import Cluster, Node, binary
from rollout.security import files, keys
from rollout.security.authority import Authority
from rollout.security.roles import Role


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """One cluster with a worker, and another that has nothing to do with it."""
    root = tmp_path_factory.mktemp("identity")
    with Cluster(root / "ours") as ours, Cluster(root / "theirs") as theirs:
        for cluster in (ours, theirs):
            cluster.add_coordinator()
        for cluster in (ours, theirs):
            cluster.coordinators[0].wait_event("coordinator_ready")
        ours.add_worker().wait_event("worker_ready")
        yield ours, theirs


def administer(cluster: Cluster, *args: str) -> Finished:
    node = cluster.coordinators[0]
    command = [binary("rollout-coordinator"), *args, "--config", str(node.directory / "coordinator.toml")]
    done = prefork.run(command, cwd=node.directory, text=True)
    return Finished(done.returncode, done.stdout, done.stderr)


def join(cli: Cli, address: str, token: str, tls_dir: str, program: str = "rollout-worker") -> Finished:
    process = cli.start(
        "join", "--coordinator", address, "--token", token, "--tls-dir", tls_dir, program=binary(program)
    )
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return Finished(process.returncode, out, err)


def test_tokens(cli: Cli, clusters: tuple[Cluster, Cluster]) -> None:
    ours, theirs = clusters
    at = ours.join_address
    expiring = administer(ours, "token", "create", "--role", "worker", "--ttl", "1s").out.strip()
    made = time.monotonic()
    good = ours.token("worker")
    assert join(cli, at, good, "tls").code == 0
    again = join(cli, at, good, "tls")
    assert again.code == 0, "the same host may repeat its join: the reply may have been lost"
    until(lambda: time.monotonic() - made > 1.5, "the token to expire")
    for token, words in (
        (good, "is used up (1 of 1 hosts joined); make a new one with `rollout-coordinator token create`, with --uses"),
        (expiring, "has expired; make a new one with `rollout-coordinator token create`"),
        (good[:-3], "mistyped or cut off: its checksum does not match; copy the whole line"),
        (good[:10] + ("a" if good[10] != "a" else "b") + good[11:], "mistyped or cut off"),
        ("hunter2", "not a join token, which begins with rj1. and has five parts: copy the whole line"),
        (theirs.token("worker"), "presents another CA than the one this token was made for: a different cluster, or"),
    ):
        done = join(cli, at, token, "refused")
        assert done.code == 2 and words in done.err, done
        assert token not in done.err
        left = [path.name for path in (cli.directory / "refused").glob("*") if path.name != files.HOST_KEY]
        assert left == [], left
    wrong_port = join(cli, ours.addresses[0], ours.token("worker"), "refused")
    assert wrong_port.code == 1 and "[transport] join_addr" in wrong_port.err
    log = ours.coordinators[0].log.read_text()
    assert good not in log and good.split(".")[2] not in log


def test_the_operator_of_another_cluster(cli: Cli, clusters: tuple[Cluster, Cluster]) -> None:
    ours, theirs = clusters
    tls = theirs.operator()[-1]
    cli.rows(3)
    for args in (("run", "list"), ("infer", "batch", "--config", str(cli.config()))):
        began = time.monotonic()
        done = cli.run(*args, "--coordinator", ours.addresses[0], "--tls-dir", tls)
        assert done.code == 2 and time.monotonic() - began < 45, done
        assert "belongs to another cluster than the certificates in --tls-dir" in done.err
        assert "ssl_transport" not in done.err  # gRPC's own lines
    worker_tls = ours.workers[0].directory / "data" / "tls"
    done = cli.run("workers", "--coordinator", ours.addresses[0], "--tls-dir", str(worker_tls))
    assert done.code == 2 and f"error [config_invalid]: {worker_tls} " in done.err and "role operator" in done.err


def test_a_worker_of_another_cluster_is_told(cli: Cli, clusters: tuple[Cluster, Cluster]) -> None:
    ours, theirs = clusters
    worker = ours.add_worker(start=False)
    lines = (worker.directory / "worker.toml").read_text().replace(ours.addresses[0], theirs.addresses[0])
    (worker.directory / "worker.toml").write_text(lines)
    worker.start()
    told = worker.wait_event("no_coordinator")
    assert "was not issued by this cluster's CA" in told["error"] and "join it with a new token" in told["action"]
    worker.kill(15)
    assert worker.process is not None and worker.process.returncode == 0
    assert "Traceback" not in worker.log.read_text() and "ssl_transport" not in worker.log.read_text()


def expire(cluster: Cluster, node: Node) -> None:
    """The certificate of the host as it is after the host was off for longer than its lifetime."""
    tls = node.directory / "data" / "tls"
    authority = Authority.load(cluster.coordinators[0].directory / "data" / "tls", "rollout")
    assert authority is not None
    host_id = json.loads((tls / files.JOINED).read_text())["host_id"]
    key = keys.load_key((tls / files.HOST_KEY).read_bytes(), "host")
    issued = authority.issue_host(key.public_key(), role=Role.WORKER, host_id=host_id, lifetime_s=-2)
    (tls / files.HOST).write_bytes(issued.pem)


def test_a_certificate_that_expired_while_the_host_was_off(cli: Cli, clusters: tuple[Cluster, Cluster]) -> None:
    ours, _ = clusters
    worker = ours.add_worker(start=False)
    expire(ours, worker)
    worker.start()
    assert worker.process is not None
    code = worker.process.wait(timeout=60)
    told = list(worker.events())[-1]
    assert code == 2 and told["event"] == "worker_config_error", worker.tail()
    assert "expired" in told["error"] and "join" in told["error"]
    done = join(cli, ours.join_address, ours.token("worker"), str(worker.directory / "data" / "tls"))
    assert done.code == 0, done
    worker.start().wait_event("worker_ready")
    worker.kill(15)


def test_a_revoked_host_gets_no_more_work(cli: Cli, clusters: tuple[Cluster, Cluster]) -> None:
    ours, _ = clusters
    worker = ours.add_worker()
    worker.wait_event("worker_ready")
    host_id = json.loads((worker.directory / "data/tls" / files.JOINED).read_text())["host_id"]
    assert f"{host_id}  worker" in (listed := administer(ours, "host", "list").out) and "active" in listed
    done = administer(ours, "host", "revoke", host_id[-8:].lower())  # as logs and events name it
    assert done.code == 0 and f"{host_id} revoked" in done.out
    began = time.monotonic()
    assert worker.process is not None
    code = worker.process.wait(timeout=60)
    assert time.monotonic() - began < 60
    refused = next(worker.events("worker_refused"))
    assert code in (1, 2) and "was revoked; join it again with a new token" in refused["error"], worker.tail()
    worker.start()
    assert worker.process.wait(timeout=60) in (1, 2)
    assert "revoked" in list(worker.events())[-1]["error"]
    cli.rows(20)
    assert cli.run("infer", "batch", "--config", str(cli.config()), *ours.operator()).code == 0  # the other one works
    wrong = administer(ours, "host", "revoke", "01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert wrong.code == 2 and "host list" in wrong.err, wrong
