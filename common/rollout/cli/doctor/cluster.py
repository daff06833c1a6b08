"""Checks of the cluster as seen from this host: who answers, how fast, its version, clock and health."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.cli.doctor.finding import Finding, fault, ok, unless, warning
from rollout.cli.doctor.machine import space_of
from rollout.cli.show import cannot_start
from rollout.client.target import Target
from rollout.model.address import parse_address
from rollout.model.counts import counted
from rollout.model.errors import RolloutError
from rollout.model.ids import short
from rollout.security import files

if TYPE_CHECKING:
    from grpc import ChannelCredentials

    from rollout.security.credentials import Credentials
    from rollout.security.roles import Role
    from rollout.wire.v1 import doctor_pb2 as pb
    from rollout.wire.v1 import runs_pb2

CALL_S = 5.0
PATIENCE_S = 3.0
SKEW_S = 1.0
SLOW_S = 0.2
STORAGE_SLOW_MS = 100.0
_LIFETIME_S = 600.0
_FAILING = ("failed", "quarantined")
_WHY_NONE = "check the address, that a coordinator runs there, and the firewall between"


@dataclass(slots=True)
class _Answer:
    address: str
    reply: pb.ExamineReply
    seconds: float
    ahead_s: float
    """Seconds by which its clock is ahead of this one's."""


async def cluster(target: Target, version: str) -> list[Finding]:
    """Check every coordinator of `target`. An address that does not answer is a fault."""
    if target.private is not None and not target.addresses:
        return [ok("cluster", f"{target}: no command works there at present, so there is no coordinator to ask")]
    if not target.addresses:
        return [ok("cluster", "none is named, and none was joined: nothing to look at")]
    role = _role(target)
    if role is None:
        return [
            fault(
                "cluster",
                f"{', '.join(target.addresses)}: no certificates in {target.tls_dir} to speak to it with",
                "name the directory with --tls-dir, or join: rollout join --coordinator HOST:JOIN_PORT --token-file F",
            )
        ]
    own = await _own_certificate(target, role)
    found: list[Finding] = []
    answers: list[_Answer] = []
    for outcome in await asyncio.gather(*(_examine(address, own) for address in target.addresses)):
        if isinstance(outcome, Finding):
            found.append(outcome)
        else:
            answers.append(outcome)
    for answer in answers:
        found += _of_coordinator(answer, version, "there" if len(target.addresses) == 1 else f"at {answer.address}")
    leaders = [answer for answer in answers if answer.reply.part == "leader"]
    if not leaders and answers:
        found.append(
            fault("leader", "none of the coordinators that answered leads", "see above why; their logs say more")
        )
    for leader in leaders[:1]:
        found += await _ports(leader)
        found += await _workers(leader, target, role, version)
    return found


async def _connect(address: str) -> float:
    """Return the seconds that a connection takes. Raises OSError and TimeoutError."""
    target = parse_address(address, "address", need_port=True)
    began = time.perf_counter()
    async with asyncio.timeout(CALL_S):
        _, writer = await asyncio.open_connection(target.host, target.port)
    writer.close()
    return time.perf_counter() - began


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {CALL_S:g} s"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _role(target: Target) -> Role | None:
    """Return the role for calls from here: the operator's if this is the cluster's home, else the host's."""
    from rollout.security.roles import Role

    if files.read(target.tls_dir / files.CA_KEY) is not None:
        return Role.OPERATOR
    role = str(files.joined(target.tls_dir).get("role", ""))
    return Role(role) if role in set(Role) else None


async def _credentials(target: Target, role: Role) -> Credentials:
    from rollout.client.runs import new_ulid
    from rollout.security.credentials import Credentials

    return await Credentials.obtain(
        tls_dir=target.tls_dir,
        cluster=target.cluster,
        role=role,
        incarnation=new_ulid(),
        lifetime_s=_LIFETIME_S,
        addresses=target.addresses,
        patience_s=PATIENCE_S,
    )


async def _own_certificate(target: Target, role: Role) -> ChannelCredentials:
    """Return this host's credentials without renewing them first: nothing can renew them while the database is away."""
    import grpc

    ca, key, pem = (files.read(target.tls_dir / name) for name in (files.CA, files.HOST_KEY, files.HOST))
    if files.read(target.tls_dir / files.CA_KEY) is None and ca and key and pem:
        return grpc.ssl_channel_credentials(ca, key, pem)
    return (await _credentials(target, role)).channel_credentials()


async def _examine(address: str, credentials: ChannelCredentials) -> _Answer | Finding:
    import grpc.aio

    from rollout.wire.channel import open_channel
    from rollout.wire.errors import error_of
    from rollout.wire.v1 import doctor_pb2, doctor_pb2_grpc

    name = f"coordinator {address}"
    async with open_channel(address, credentials) as channel:
        stub: Any = doctor_pb2_grpc.DoctorStub(channel)
        request = doctor_pb2.ExamineRequest(epoch=0)
        try:
            await stub.Examine(request, timeout=CALL_S)  # opens the connection
            asked, began = time.time(), time.perf_counter()
            reply: doctor_pb2.ExamineReply = await stub.Examine(request, timeout=CALL_S)
            seconds = time.perf_counter() - began
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return warning(name, "it is of an older version, which cannot be examined", "upgrade it")
            return fault(name, error_of(error).message, _WHY_NONE)
    return _Answer(address, reply, seconds, reply.now_ms / 1000 - (asked + seconds / 2))


def _of_coordinator(answer: _Answer, version: str, at: str) -> list[Finding]:
    reply, name = answer.reply, f"coordinator {answer.address}"
    up = max(0.0, (reply.now_ms - reply.started_ms) / 1000)
    who = f"{reply.part} on {reply.host}, up for {_span(up)}"
    found: list[Finding] = []
    if reply.trouble:
        found.append(fault(name, f"{who}; its database: {reply.trouble}", "as it says"))
    elif reply.part in ("leader", "standby"):
        found.append(ok(name, who))
    else:
        found.append(warning(name, who, "it is starting or stopping: look again in a moment"))
    same = reply.version == version
    text = f"rollout {reply.version}" + (f" (Python {reply.python}), as here" if same else f", here {version}")
    found.append(unless(same, f"version {at}", text, "bring both to the same version"))
    ahead = answer.ahead_s
    text = f"{abs(ahead) * 1000:.0f} ms {'ahead of' if ahead >= 0 else 'behind'} this machine's"
    remedy = "set the clocks by NTP (chronyd, systemd-timesyncd) on both"
    found.append(unless(abs(ahead) - answer.seconds / 2 <= SKEW_S, f"clock {at}", text, remedy))
    text, remedy = f"{answer.seconds * 1000:.1f} ms a call", "see the network, and how busy it is"
    found.append(unless(answer.seconds <= SLOW_S, f"latency {at}", text, remedy))
    if reply.storage_ms:
        text = f"{'PostgreSQL' if reply.storage == 'postgres' else 'SQLite'}, {reply.storage_ms:.1f} ms a read"
        remedy = "every answer waits for it: look at the disk, or the way to the database"
        found.append(unless(reply.storage_ms <= STORAGE_SLOW_MS, f"database {at}", text, remedy))
    if reply.objects:
        found.append(ok(f"objects {at}", f"in {reply.objects}"))
    found += [space_of(f"disk {at} ({disk.what})", disk.path, disk.free, disk.total) for disk in reply.disks]
    found.append(_open_files(reply, at))
    left = reply.certificate_ends_ms / 1000 - reply.now_ms / 1000
    if left < 60:
        found.append(fault(f"certificate {at}", f"ends in {left:.0f} s", "see its log for certificate_not_renewed"))
    else:
        found.append(ok(f"certificate {at}", f"ends in {_span(left)}, renewed before"))
    return found


def _open_files(reply: pb.ExamineReply, at: str) -> Finding:
    text = f"{reply.open_files} of {reply.open_files_limit} in use"
    if reply.open_files > 0.8 * reply.open_files_limit:
        return warning(f"open files {at}", text, "raise its hard limit of open files, or see who connects")
    if reply.open_files_limit < 1024:
        return warning(f"open files {at}", text, "raise its hard limit of open files: connections count too")
    return ok(f"open files {at}", text)


async def _ports(leader: _Answer) -> list[Finding]:
    """Check the two other ports; the main one has answered."""
    found: list[Finding] = []
    for name, address, report, why in (
        ("objects port", leader.reply.objects_addr, fault, "large payloads, models and results travel over it"),
        ("join port", leader.reply.join_addr, warning, "new hosts enrol there"),
    ):
        if not address:
            if name == "join port":
                found.append(ok(name, "off ([transport] join_addr is empty): no host can join"))
            continue
        try:
            seconds = await _connect(address)
        except (OSError, TimeoutError) as error:
            remedy = f"{why}: open it in the firewall, and see that the address can be reached from here"
            found.append(report(name, f"{address}: {_words(error)}", remedy))
        else:
            found.append(ok(name, f"{address} is open ({seconds * 1000:.1f} ms)"))
    return found


RUNS_MAX = 20
"""Maximum number of running runs to check, newest first."""


async def _workers(leader: _Answer, target: Target, role: Role, version: str) -> list[Finding]:
    import grpc.aio

    from rollout.security.roles import Role
    from rollout.wire.channel import open_channel
    from rollout.wire.errors import error_of
    from rollout.wire.v1 import runs_pb2, runs_pb2_grpc

    if role is not Role.OPERATOR:
        return [ok("workers", f"not asked: this host is a {role}'s, and the list is for operators")]
    try:
        credentials = await _credentials(target, role)
    except RolloutError as error:
        return [fault("workers", error.message, "as it says")]
    async with open_channel(leader.address, credentials) as channel:
        stub: Any = runs_pb2_grpc.RunsStub(channel)
        epoch = leader.reply.epoch
        try:
            reply = await stub.Workers(runs_pb2.WorkersRequest(epoch=epoch), timeout=CALL_S)
            listed = await stub.List(
                runs_pb2.ListRequest(epoch=epoch, states=["running"], limit=RUNS_MAX), timeout=CALL_S
            )
            runs = [
                (await stub.Get(runs_pb2.RunRequest(epoch=epoch, run_id=run.spec.run_id), timeout=CALL_S)).status
                for run in listed.runs
            ]
        except grpc.aio.AioRpcError as error:
            return [fault("workers", error_of(error).message, "as it says")]
    workers: list[runs_pb2.WorkerStatus] = list(reply.workers)
    found: list[Finding] = []
    for worker in workers:
        if worker.state in _FAILING:
            found.append(
                warning(
                    f"worker {worker.incarnation}",
                    f"{worker.state} on {worker.inventory.host}: {worker.reason or 'no reason is known'}",
                    "see its log" if worker.state == "failed" else "find out what it sent; revoke its host if need be",
                )
            )
    present = [worker for worker in workers if worker.state not in (*_FAILING, "gone")]
    states = Counter(worker.state for worker in present)
    text = ", ".join(f"{count} {state}" for state, count in states.items()) or "none is connected"
    found.append(unless(bool(present), "workers", text, "start one: rollout-worker run"))
    others = Counter(worker.inventory.version for worker in present if worker.inventory.version != version)
    for other, count in others.items():
        found.append(
            warning("version of workers", f"{count} of them have {other}, here {version}", "bring them to one version")
        )
    return found + [finding for run in runs for finding in _of_run(run)]


def _of_run(run: runs_pb2.RunStatus) -> Iterator[Finding]:
    """Yield what keeps a running run from progressing and does not resolve by itself."""
    what = f"run {short(run.spec.run_id)}"
    see = f"`rollout run show {short(run.spec.run_id)}` says more"
    for wait in run.waits:
        if wait.impossible:
            waiting = f"{counted(wait.items, 'item')} cannot begin: {wait.message}"
            yield warning(what, waiting, f"start a worker that can take them (rollout-worker run); {see}")
    for cause in run.causes:
        yield warning(what, cannot_start(cause), f"mend it there; {see}")


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
