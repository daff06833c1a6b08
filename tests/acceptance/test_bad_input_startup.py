"""What a person gets wrong before anything runs: the daemons and commands say so, in a bounded time, without a traceback."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from collections.abc import Iterator

import pytest
from acceptance_cli import Cli, Finished
from cluster import binary, free_port
from postgres import PostgresServer, execute

COORDINATOR = """
[storage.embedded]
path = "data/rollout.db"

[transport]
listen_addr = "127.0.0.1:0"
tls_dir = "data/tls"
"""
WORKER = """
[worker]
slots = 1

[transport]
coordinator_addrs = ["127.0.0.1:1"]
tls_dir = "data/tls"
"""


@pytest.fixture
def daemon(cli: Cli) -> Cli:
    (cli.directory / "coordinator.toml").write_text(COORDINATOR)
    (cli.directory / "worker.toml").write_text(WORKER)
    cli.env["ROLLOUT_LOGGING__FORMAT"] = "json"
    return cli


def run(cli: Cli, program: str, *args: str, **env: str) -> Finished:
    before, cli.env = cli.env, cli.env | env
    try:
        process = cli.start(*args, program=binary(program))
        out, err = process.communicate(timeout=60)
    finally:
        cli.env = before
    assert "Traceback" not in out + err, out + err
    return Finished(process.returncode, out, err)


def coordinator(cli: Cli, **env: str) -> Finished:
    return run(cli, "rollout-coordinator", "run", "--config", "coordinator.toml", **env)


def worker(cli: Cli, **env: str) -> Finished:
    return run(cli, "rollout-worker", "run", "--config", "worker.toml", **env)


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", free_port())) as s:
        yield f"127.0.0.1:{s.getsockname()[1]}"


def test_a_file_of_another_program(daemon: Cli) -> None:
    done = run(daemon, "rollout-coordinator", "run", "--config", "worker.toml")
    assert done.code == 2
    assert "worker.toml:2: worker: " in done.err and "`rollout-worker run`" in done.err
    done = run(daemon, "rollout-worker", "run", "--config", "coordinator.toml")
    assert done.code == 2
    assert "coordinator.toml:2: storage: " in done.err and "`rollout-coordinator run`" in done.err
    daemon.rows(1)
    daemon.config()
    done = run(daemon, "rollout-worker", "run", "--config", "batch.toml")
    assert done.code == 2 and "`rollout infer batch`" in done.err


def test_contradictory_timeouts(daemon: Cli) -> None:
    done = coordinator(daemon, ROLLOUT_TRANSPORT__WORKER_SELF_FENCE_TIMEOUT_MS="6000")
    assert done.code == 2 and "worker_self_fence_timeout_ms (6000) " in done.err
    done = worker(daemon, ROLLOUT_TRANSPORT__CLOCK_SKEW_BUDGET_MS="1000")
    assert done.code == 2 and "clock_skew_budget_ms (1000) " in done.err and "heartbeat_interval_ms" in done.err


def test_ports_that_are_taken(daemon: Cli, taken: str) -> None:
    for key in ("TRANSPORT__LISTEN_ADDR", "TRANSPORT__JOIN_ADDR", "HTTP__LISTEN_ADDR", "OBJECTS__LISTEN_ADDR"):
        done = coordinator(daemon, **{f"ROLLOUT_{key}": taken})
        section, name = key.lower().split("__")
        assert done.code == 2, done
        assert f"[{section}] {name} '{taken}' " in done.err


def test_directories_that_cannot_be_written(daemon: Cli) -> None:
    (daemon.directory / "file").write_text("")  # root may write in every directory, but in no file
    for key, named in (
        ("STORAGE__EMBEDDED__PATH", "[storage.embedded] path"),
        ("TRANSPORT__TLS_DIR", "transport.tls_dir"),
        ("OBJECTS__PATH", "[objects] path"),
    ):
        done = coordinator(daemon, **{f"ROLLOUT_{key}": "file/below"})
        assert done.code == 2 and f"check {named}" in done.err, done


def test_databases_that_are_none_of_ours(daemon: Cli) -> None:
    (daemon.directory / "text.db").write_text("these are my notes\n" * 500)
    done = coordinator(daemon, ROLLOUT_STORAGE__EMBEDDED__PATH="text.db")
    assert done.code == 2
    assert "text.db is not a SQLite database" in done.err and "[storage.embedded] path" in done.err
    assert (daemon.directory / "text.db").read_text() == "these are my notes\n" * 500
    assert run(daemon, "rollout-coordinator", "token", "create", "--role", "worker").code == 0  # makes the database
    with sqlite3.connect(daemon.directory / "data" / "rollout.db") as database:
        database.execute("UPDATE schema_version SET version = version + 90")
    database.close()
    for args in (("run",), ("token", "create", "--role", "worker"), ("host", "list")):
        done = run(daemon, "rollout-coordinator", *args, "--config", "coordinator.toml")
        assert done.code == 2 and "has schema version 9" in done.err, done
        assert "error [schema_newer]" in done.err


def test_postgres_that_lets_nobody_in(daemon: Cli, postgres_server_url: str) -> None:
    host = postgres_server_url.rpartition("/")[0]
    daemon.env |= {"ROLLOUT_STORAGE__BACKEND": "postgres"}
    for url, words in (
        (f"{host}/no_such_database", "does not exist"),
        (host.replace("//", "//nobody_known:x@").replace("x@nobody@", "x@") + "/postgres", "nobody_known"),
        ("mysql://x", "invalid DSN"),
    ):
        done = coordinator(daemon, ROLLOUT_STORAGE__POSTGRES__URL=url)
        assert done.code == 2 and words in done.err and "[storage.postgres] url" in done.err, done
        assert ":x@" not in done.out + done.err
    done = run(
        daemon,
        "rollout-coordinator",
        *("token", "create", "--role", "worker"),
        ROLLOUT_STORAGE__POSTGRES__URL="postgresql://u:secret@127.0.0.1:1/db",
    )
    assert done.code == 1 and "[storage.postgres] url" in done.err
    assert "secret" not in done.out + done.err


def test_a_password_that_is_wrong(daemon: Cli, postgres_server: PostgresServer) -> None:
    execute(postgres_server.url, "CREATE ROLE rollout LOGIN PASSWORD 'of-the-server'")
    allowed = f"host all {postgres_server.user} 127.0.0.1/32 trust\nhost all rollout 127.0.0.1/32 scram-sha-256\n"
    (postgres_server.directory / "data" / "pg_hba.conf").write_text(allowed)
    execute(postgres_server.url, "SELECT pg_reload_conf()")
    daemon.env |= {"ROLLOUT_STORAGE__BACKEND": "postgres"}
    address = postgres_server.url.rpartition("@")[2]
    for login in ("rollout:not-the-one", "rollout"):
        url = f"postgresql://{login}@{address}"
        for args in (("run",), ("token", "create", "--role", "worker")):
            done = run(daemon, "rollout-coordinator", *args, ROLLOUT_STORAGE__POSTGRES__URL=url)
            assert done.code == 2 and "PostgreSQL refused the connection" in done.err, done
            assert "password" in done.err and "[storage.postgres] url" in done.err, done
            assert "not-the-one" not in done.out + done.err


def test_keys_and_certificates_that_cannot_be_used(daemon: Cli) -> None:
    assert run(daemon, "rollout-coordinator", "token", "create", "--role", "worker").code == 0
    tls = daemon.directory / "data" / "tls"
    assert tls.joinpath("ca.key.pem").stat().st_mode & 0o777 == 0o600
    tls.joinpath("ca.key.pem").chmod(0o644)
    for done in (coordinator(daemon), worker(daemon)):
        assert done.code == 2 and "chmod 600 data/tls/ca.key.pem" in done.out + done.err, done
    tls.joinpath("ca.key.pem").chmod(0o640)  # a group may: Kubernetes mounts secrets so
    assert run(daemon, "rollout-coordinator", "token", "create", "--role", "worker").code == 0
    tls.joinpath("ca.pem").write_text("nonsense")
    for done in (coordinator(daemon), worker(daemon)):
        assert done.code == 2 and "ca.pem holds no usable certificate" in done.out + done.err, done


def test_a_worker_that_cannot_begin(daemon: Cli, taken: str) -> None:
    done = worker(daemon)
    assert done.code == 2 and "rollout-worker join --coordinator HOST:JOIN_PORT --token-file FILE" in done.out
    assert run(daemon, "rollout-coordinator", "token", "create", "--role", "worker").code == 0  # a CA: no need to join
    (daemon.directory / "file").write_text("")
    for key, value, words in (
        ("WORKER__SCRATCH_DIR", "file/x", "check [worker] scratch_dir"),
        ("OBJECTS__CACHE_DIR", "file/x", "check [objects] cache_dir"),
        ("HTTP__LISTEN_ADDR", taken, f"[http] listen_addr '{taken}' cannot be listened on"),
        ("COMPUTE__BACKEND", "cray", '[compute] backend: unknown backend "cray"; known: '),
    ):
        done = worker(daemon, **{f"ROLLOUT_{key}": value})
        assert done.code == 2 and words in done.out.replace('\\"', '"') + done.err, done
    done = run(daemon, "rollout-worker", "run", "--config", "worker.toml", "--plugin", "none.toml")
    assert done.code == 2 and "none.toml: " in done.out


def test_coordinators_that_nobody_is(daemon: Cli) -> None:
    """The worker tries on and says so; a command gives up in a bounded time; joining says which port it wants."""
    token = run(daemon, "rollout-coordinator", "token", "create", "--role", "worker").out.strip()
    process = daemon.start("run", "--config", "worker.toml", program=binary("rollout-worker"))
    began = time.monotonic()
    done = daemon.run("run", "list", "--coordinator", f"127.0.0.1:{free_port()}", "--tls-dir", "data/tls")
    assert done.code == 1 and time.monotonic() - began < 30
    assert "error [unavailable]" in done.err and "refuses connections" in done.err
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    (told,) = [e for e in Finished(0, out, err).events if e["event"] == "no_coordinator"][:1]
    assert told["level"] == "warning" and "[transport] coordinator_addrs" in told["action"]
    join = ("join", "--coordinator", "127.0.0.1:1", "--token", token, "--tls-dir", "joined")
    done = run(daemon, "rollout-worker", *join)
    assert done.code == 1 and "[transport] join_addr" in done.err
    assert not os.path.lexists(daemon.directory / "joined")
