"""The coordinator's command and what it passes on: exit codes, its child process, orders to workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
import pytest
from coordinator_peers import FakeClient, FakeWorker, items, ulid
from coordinator_places import config, free_addr, inprocess
from rollout.wire.v1 import control_pb2, control_pb2_grpc, runs_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def command(*args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollout_coordinator",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("[transprot]\nx = 1\n", 'did you mean "transport"'),
        ("[http]\nlisten_adr = 1\n", 'did you mean "listen_addr"'),
        ('[http]\nlisten_addr = "256.1.1.1:x"\n', "listen_addr"),
    ],
)
async def test_bad_configuration_exits_2_and_says_where(tmp_path: Path, extra: str, says: str) -> None:
    path = config(tmp_path, free_addr(), extra=extra)
    code, out, err = await command("run", "--config", str(path), "--json-logs")
    assert code == 2 and says in err, (out, err)


async def test_a_taken_port_is_a_configuration_error(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    addr = "127.0.0.1:" + str(server.sockets[0].getsockname()[1])
    code, _, err = await command("run", "--config", str(config(tmp_path, addr)))
    assert code == 2 and "is another process there" in err
    server.close()
    await server.wait_closed()


async def test_usage(tmp_path: Path) -> None:
    path = str(config(tmp_path, free_addr()))
    assert (await command("version"))[1].startswith("rollout-coordinator ")
    code, _, err = await command("token", "create", "--config", path, "--role", "worker", "--ttl", "soon")
    assert code == 2 and "no duration" in err
    assert (await command("token", "create", "--config", path, "--role", "king"))[0] == 2
    assert (await command("run", "--config", str(tmp_path / "none.toml")))[0] == 2


async def test_a_token_of_a_new_authority_says_so(tmp_path: Path) -> None:
    path = str(config(tmp_path, free_addr()))
    for said in (True, False):
        code, out, err = await command("token", "create", "--config", path, "--role", "worker")
        assert code == 0 and len(out.split()) == 1
        assert ("a new certificate authority was made in" in err) is said


@pytest.mark.parametrize("verb", [("list",), ("revoke", "01ABCDEF")])
async def test_hosts_are_not_looked_for_in_a_database_that_is_made_for_it(
    tmp_path: Path, verb: tuple[str, ...]
) -> None:
    path = config(tmp_path, free_addr())
    code, _, err = await command("host", *verb, "--config", str(path))
    assert code == 2 and "there is no database" in err and not list(tmp_path.rglob("*.db"))


async def test_the_objects_server_is_started_again_where_it_was(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, parts):
        before, pid = parts.objects_child.addr, parts.objects_child.pid
        assert pid is not None and node.addr
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while parts.objects_child.pid == pid or not parts.objects_child.ready.is_set():
                parts.objects_child.ready.clear()
                await parts.objects_child.ready.wait()
        assert parts.objects_child.addr == before


async def test_orders_reach_a_worker(tmp_path: Path) -> None:
    async with inprocess(tmp_path) as (node, _):
        worker = await FakeWorker([node.addr], tmp_path / "tls").start()
        await worker.until(lambda: worker.welcomes == 1)
        client = await FakeClient.open([node.addr], tmp_path / "tls")
        assert worker.channel is not None
        call = control_pb2_grpc.ControlStub(worker.channel).Subscribe(
            control_pb2.SubscribeRequest(epoch=0, incarnation=worker.incarnation)
        )
        await call.initial_metadata()
        for verb, argument, body in (
            ("log-level", "debug", "log_level"),
            ("reload", "a,b", "reload"),
            ("drain", "", "drain"),
        ):
            request = runs_pb2.WorkerCommandRequest(
                epoch=0, incarnation=worker.incarnation, verb=verb, argument=argument
            )
            await client.stub.Worker(request)
            order = await call.read()
            assert order.WhichOneof("body") == body and order.epoch == 0
        reply = await client.stub.Workers(runs_pb2.WorkersRequest(epoch=0))
        assert reply.leader == node.addr and reply.workers[0].incarnation == worker.incarnation
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Worker(runs_pb2.WorkerCommandRequest(epoch=0, incarnation=ulid(), verb="drain"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        await client.submit(ulid(), [items(3)])  # a draining worker gets none of it
        await client.close()
        await worker.stop()
        assert not worker.assigned
