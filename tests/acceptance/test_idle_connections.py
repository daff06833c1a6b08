"""Connections that say nothing: they take no descriptors that others need, and the log stays short."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, Node, free_port

OPEN_FILES = 256
IDLE = 400


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "nodes") as found:
        node = found.add_coordinator(start=False, objects={"listen_addr": f"127.0.0.1:{free_port()}"})
        # The hard limit too: it cannot be raised to more.
        node.command = ["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$0" "$@"', *node.command]
        node.start().wait_event("coordinator_ready")
        yield found


def descriptors(node: Node) -> int:
    assert node.process is not None
    coordinator = psutil.Process(node.process.pid)
    return max(process.num_fds() for process in (coordinator, *coordinator.children()))


@contextlib.contextmanager
def idle_at(address: str, count: int = IDLE) -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(socket.create_connection((host, int(port)), timeout=60)))
            for _ in range(count)
        ]


def test_400_idle_connections_at_each_port_at_once(cli: Cli, cluster: Cluster) -> None:
    (node,) = cluster.coordinators
    at = cluster.operator()
    ready = node.wait_event("coordinator_ready")
    before = descriptors(node)
    with contextlib.ExitStack() as held:
        for port in ("addr", "join_addr", "objects_addr", "http_addr"):
            held.enter_context(idle_at(ready[port]))
        assert cli.run("workers", *at, timeout=60).code == 0
        with urllib.request.urlopen(f"http://{ready['http_addr']}/readyz", timeout=60) as answer:
            assert answer.read() == b"leader\n"
        cluster.add_worker().wait_event("worker_ready")  # joins first
        assert descriptors(node) < OPEN_FILES - 32
        assert len(json.loads(cli.run("workers", *at, "--json").out)["workers"]) == 1
    until(lambda: descriptors(node) <= before + 12, "descriptors to come back")
    unpleasant = [event for event in node.events() if event["level"] in ("warning", "error")]
    assert [event["event"] for event in unpleasant if event["event"] != "connections_closed"] == []
    assert 1 <= len(unpleasant) <= 3 and "Traceback" not in node.log.read_text()


def test_idle_behind_tls_at_the_join_port(cluster: Cluster) -> None:
    """Anybody can finish a handshake there; that earns no more than the cap, and a few seconds."""
    (node,) = cluster.coordinators
    host, _, port = node.wait_event("coordinator_ready")["join_addr"].rpartition(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    held: list[ssl.SSLSocket] = []
    for _ in range(60):
        with contextlib.suppress(OSError):  # refused above the limit
            held.append(context.wrap_socket(socket.create_connection((host, int(port)), timeout=5)))
    cluster.operator()  # joins from the same address
    for one in held:
        one.close()
