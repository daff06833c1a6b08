"""A real coordinator and worker over mutual TLS, an innocent client's runs, and attackers of every role beside them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from blake3 import blake3
from coordinator_peers import credentials, ulid
from hostile_messages import Feed, build, damage
from rollout.model.item import ItemSpec
from rollout.security import keys
from rollout.security.authority import Authority
from rollout.security.roles import Role
from rollout.wire.channel import CLIENT_OPTIONS, open_channel
from rollout.wire.v1 import control_pb2, heartbeat_pb2, join_pb2, objects_pb2, runs_pb2, serve_pb2, work_pb2
from worker_nodes import Daemon, Nodes, collect, free_port, script, submit

SERVICES = (control_pb2, heartbeat_pb2, join_pb2, objects_pb2, runs_pb2, serve_pb2, work_pb2)
FRAMES_MAX = 6
CALL_S = 0.7
PATIENCE_S = 30.0
ROWS = 30
MEMORY_MAX = 200 << 20
ROLES = ("worker", "operator", "coordinator", "host", "stranger", "nobody")

TYPED = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        # the attacker's own: it goes away after CALL_S
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    }
)


@dataclass(frozen=True)
class Method:
    path: str
    kind: Any
    streams_in: bool
    streams_out: bool

    def call(self, channel: grpc.aio.Channel) -> Any:
        """Raw bytes both ways: also what no library would send."""
        name = f"{'stream' if self.streams_in else 'unary'}_{'stream' if self.streams_out else 'unary'}"
        return getattr(channel, name)(self.path)


def methods() -> list[Method]:
    """Every call of every service, from the descriptors."""
    found: list[Method] = []
    for file in SERVICES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                kind = getattr(file, method.input_type.name)
                path = f"/{service.full_name}/{method.name}"
                found.append(Method(path, kind, method.client_streaming, method.server_streaming))
    return found


METHODS = methods()


@dataclass
class WireScene:
    nodes: Nodes
    runs: Any
    addresses: dict[str, str]  # main, join, objects
    channels: dict[tuple[str, str], grpc.aio.Channel]
    incarnations: dict[str, str]
    run_id: str  # an unfinished run of the innocent, which no attacker may touch
    own_run: str = field(default_factory=ulid)
    codes: Counter[str] = field(default_factory=Counter[str])
    untyped: list[str] = field(default_factory=list[str])
    innocent_runs: int = 0
    slowest_s: float = 0.0
    memory: int = 0

    # ---- attackers

    def known(self, role: str) -> dict[str, Any]:
        """A worker may know everything of the innocent; an operator's word over a run is law, so it knows its own."""
        run = self.run_id if role != "operator" else self.own_run
        own = self.incarnations.get(role, ulid())
        digest = bytes(32)
        return {
            "epoch": (0, 0, 0, 1),
            "incarnation": (own, own, own, self.incarnations["innocent"] if role != "operator" else own),
            "WorkUp.session": (ulid(),),
            "run_id": (run,),
            "log": (1, 2, 3),
            "seq": (0, 1, 2),
            "attempt": (1,),
            "CapacityEntry.value": (4.0,),
            "ItemBatch.ids": (lambda rows: digest * rows,),
            "ItemBatch.length": (0,),
            "ItemBatch.data": (b"",),
            "ItemBatch.refs": (),
            "ResultGroup.length": (0,),
            "ResultGroup.data": (b"",),
            "RunSpec.workload": ("other", "script"),
            "RunSpec.order": ("schedule", "arrival"),
            "RunSpec.config": (b"{}",),
            "CommandRequest.verb": ("pause", "resume", "kill", "continue", "priority"),
            "WorkerCommandRequest.verb": ("drain", "reload", "log-level"),
            "object_id": (digest,),
            "object_ids": (digest,),
            "csr_pem": (CSR, b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"),
            "PutUp.size": (0, 5, (1 << 64) - 1),
            "PutUp.chunk": (b"hello", b"", b"x" * 600_000),
            "PutUp.pin": ("", "x\x00", "p" * 200, self.run_id),
            "GetRequest.offset": (0, (1 << 63), (1 << 64) - 1),
            "GetRequest.length": (0, (1 << 64) - 1),
            "AddRequest.data": (b"hello", b"", b"x" * 300_000),
            "AddRequest.digest": (blake3(b"hello").digest(), digest, b""),
            "ReadRequest.offset": (0, 1, 1 << 40, (1 << 64) - 1),
            "ReadRequest.length": (0, 5, 1 << 19, (1 << 64) - 1),
        }

    def frames(self, method: Method, role: str, feed: Feed) -> list[bytes]:
        known = self.known(role)
        count = 1 + feed.below(FRAMES_MAX) if method.streams_in else 1
        frames: list[bytes] = []
        session = ulid()
        for n in range(count):
            message = build(method.kind, feed, known, depth=3)
            if method.path.endswith("Work/Stream"):
                message.session = message.session and session
                if n == 0 and feed.below(8):
                    message.hello.CopyFrom(build(work_pb2.Hello, feed, known, depth=2))
            if method.path.endswith("Runs/Submit") and n == 0 and feed.below(8):
                message.open.CopyFrom(build(runs_pb2.RunSpec, feed, known, depth=2))
            if method.path.endswith("Serve/Stream") and n == 0 and feed.below(8):
                message.open.run_id = self.own_run
            frames.append(damage(Feed(feed.take(4)), message.SerializeToString()))
        if feed.below(40) == 1:
            frames[-1] += b"\xfa\x7f\x80\x80\x80\x01" + bytes(2 << 20)  # two MiB in a field that nobody knows
        return frames

    async def attack(self, role: str, at: int, feed: Feed) -> None:
        method = METHODS[at % len(METHODS)]
        port = "join" if "Join/" in method.path else "objects" if "Objects/" in method.path else "main"
        if feed.below(10) == 1:
            port = feed.pick(("main", "join", "objects"))  # a service that is not there
        frames = self.frames(method, role, feed)
        code, details = await self._call(method, self.channels[role, port], frames)
        name = code.name
        if role in ("stranger", "nobody") and port != "join":
            assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), (role, method.path, name)
        self.codes[name] += 1
        # grpc.aio's own at the client's side, for a write to a stream that has just ended.
        library = code is grpc.StatusCode.INTERNAL and "from Core" in details
        if code not in TYPED and not library:
            self.untyped.append(f"{role} {method.path}: {name} {details[:300]}")

    async def _call(self, method: Method, channel: grpc.aio.Channel, frames: list[bytes]) -> tuple[Any, str]:
        multi = method.call(channel)
        call: Any = multi(timeout=CALL_S) if method.streams_in else multi(frames[0], timeout=CALL_S)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            if method.streams_in:
                for frame in frames:
                    await call.write(frame)
                await call.done_writing()
            if method.streams_out:
                while await call.read() is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
                    pass
            else:
                await call
        return await call.code(), await call.details() or ""

    # ---- the innocent

    async def innocent(self) -> None:
        """A run like any other, beside the attack: in time, in order, once."""
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE_S):
            rows = [script({"data": f"row {n}"}, LABELLED, salt=self.innocent_runs) for n in range(ROWS)]
            run_id = await submit(self.runs, rows)
            entries, status = await collect(self.runs, run_id)
        assert [e.seq for e in entries] == list(range(ROWS))
        assert [bytes(e.data) for e in entries] == [b"row %d" % n for n in range(ROWS)], entries[0]
        assert status.state == "completed" and status.done == ROWS and status.worker_lost == 0
        assert status.attempts == ROWS
        self.innocent_runs += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    # ---- the judge

    def judge(self) -> None:
        coordinator, worker = self.nodes.daemons
        assert not self.untyped, "\n".join(self.untyped[:10])
        for daemon in (coordinator, worker):
            assert daemon.process.poll() is None
            text = daemon.log.read_text(errors="replace")
            assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:3000]
        assert len(coordinator.events("coordinator_ready")) == 1 and not coordinator.events("coordinator_fenced")
        assert not coordinator.events("storage_unavailable") and not coordinator.events("objects_server_died")
        innocent = self.incarnations["innocent"]
        assert not [e for e in coordinator.events("worker_failed") if e["worker"] == innocent]
        assert not [e for e in coordinator.events("worker_quarantined") if e["worker"] == innocent]
        grown = rss(coordinator) - self.memory
        assert grown < MEMORY_MAX, f"the coordinator grew by {grown >> 20} MiB"


CSR = keys.signing_request(keys.new_key())
LABELLED = ItemSpec(require_labels=(("who", "innocent"),))


def rss(daemon: Daemon) -> int:
    processes = [psutil.Process(daemon.process.pid), *daemon.family()]
    return sum(p.memory_info().rss for p in processes)


async def open_scene(root: Path) -> WireScene:
    join, http = free_port(), free_port()
    nodes = Nodes(root, join_addr=f"127.0.0.1:{join}")
    try:
        nodes.env["ROLLOUT_HTTP__LISTEN_ADDR"] = f"127.0.0.1:{http}"
        nodes.env["ROLLOUT_LOGGING__LEVEL"] = "info"
        ready = await nodes.coordinator().event("coordinator_ready")
        del nodes.env["ROLLOUT_HTTP__LISTEN_ADDR"]
        config = root / "worker.toml"
        config.write_text('[worker]\nslots = 4\nlabels = {who = "innocent"}\n')
        worker = nodes.worker("--config", str(config))
        incarnation = (await worker.event("worker_ready"))["worker"]
        addresses = {"main": nodes.address, "join": f"127.0.0.1:{join}", "objects": ready["objects_addr"]}
        incarnations = {"innocent": incarnation} | {role: ulid() for role in ROLES}
        channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        for role in ROLES:
            own = await _credentials(role, incarnations[role], nodes.tls_dir, root)
            for port, address in addresses.items():
                anonymous = grpc.ssl_channel_credentials((nodes.tls_dir / "ca.pem").read_bytes())
                given = anonymous if port == "join" else own
                channels[role, port] = (
                    grpc.aio.secure_channel(address, given, options=CLIENT_OPTIONS)
                    if isinstance(given, grpc.ChannelCredentials)
                    else open_channel(address, given)
                )
        runs = await nodes.client()
        waiting = await submit(runs, [script({"echo": 1}, ItemSpec(require_labels=(("who", "never"),)))])
        scene = WireScene(nodes, runs, addresses, channels, incarnations, waiting)
        await scene.innocent()
        scene.memory = rss(nodes.daemons[0])
        return scene
    except BaseException:
        nodes.close()
        raise


async def _credentials(role: str, incarnation: str, tls_dir: Path, root: Path) -> Any:
    if role == "nobody":
        return grpc.ssl_channel_credentials((tls_dir / "ca.pem").read_bytes())
    if role == "stranger":
        other = root / "other"
        Authority.load_or_create(other, "rollout")
        return await credentials(other, Role.OPERATOR, incarnation)
    if role == "host":
        authority = Authority.load_or_create(tls_dir, "rollout")
        key = keys.new_key()
        issued = authority.issue_host(key.public_key(), role=Role.WORKER, host_id=ulid(), lifetime_s=3600.0)
        return grpc.ssl_channel_credentials(authority.ca_pem, keys.key_pem(key), issued.pem)
    return await credentials(tls_dir, Role(role), incarnation)


async def close_scene(scene: WireScene) -> None:
    for channel in scene.channels.values():
        await channel.close()
    await scene.runs.close()
    scene.nodes.close()
    if os.environ.get("FUZZ_TIMES"):
        print(
            f"\ncalls by status: {dict(scene.codes)}; innocent runs {scene.innocent_runs}, slowest {scene.slowest_s:.1f} s"
        )
