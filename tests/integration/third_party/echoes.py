"""An executor whose attempts are replicas that answer what they are asked. For test_relay.py.

A request is `VERB REST`: `echo` answers with the rest, `flood` with so many MiB, `hung` with the channels that hung up
and what it runs as; `forge` says something in the name of an attempt of another process, and `more` than a message may
have.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from rollout.wire.pieces import PIECE_MAX
from rollout.wire.v1 import common_pb2, work_pb2
from rollout_worker.executors.port import Attempt, Context, Done, Replica, Run
from rollout_worker.processes.kinds import Kind


class Echo:
    placement: ClassVar[Literal["engine", "slot"]] = "engine"
    concurrency = 4

    @classmethod
    def engine_key(cls, run: Run) -> str:
        return run.run_id

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        return {}

    async def start(self, run: Run, context: Context) -> None: ...

    async def close(self) -> None: ...

    async def run(self, attempt: Attempt, context: Context) -> Done:
        hung_up: list[int] = []
        async with context.replica() as replica:
            async for channel, data in replica.frames():
                if data is None:
                    hung_up.append(channel)
                    continue
                verb, _, rest = data.partition(b" ")
                if verb == b"echo":
                    replica.send(channel, rest)
                elif verb == b"flood":
                    for _ in range(int(rest)):
                        replica.send(channel, bytes(1 << 20))
                elif verb == b"hung":
                    replica.send(channel, json.dumps({"hung_up": hung_up, "channel": channel}).encode())
                elif verb == b"withdraw":
                    replica.withdraw()
                elif verb == b"forge":
                    forge(context, json.loads(rest))
                    replica.send(channel, b"forged")
                elif verb == b"more":
                    said = work_pb2.RelayData(replica=key_of(replica), channel=channel, data=bytes(PIECE_MAX + 1))
                    raw(context, work_pb2.WorkUp(said=said))
                elif verb == b"end":
                    return Done(b"")
        raise AssertionError("frames ended")


def forge(context: Context, asked: dict[str, Any]) -> None:
    """All that a replica says, of another one."""
    key = common_pb2.ReplicaKey(**asked["replica"])
    raw(context, work_pb2.WorkUp(announce=work_pb2.Announce(run_id=asked["run"], replica=key, engine="forged")))
    for channel in asked["channels"]:
        said = work_pb2.RelayData(replica=key, channel=channel, data=b"forged")
        raw(context, work_pb2.WorkUp(said=said))
    raw(context, work_pb2.WorkUp(withdraw=work_pb2.Withdraw(replica=key)))


def key_of(replica: Replica) -> common_pb2.ReplicaKey:
    return replica._key  # type: ignore[attr-defined]


def raw(context: Context, frame: work_pb2.WorkUp) -> None:
    context._requests.send(Kind.RELAY, frame.SerializeToString())  # type: ignore[attr-defined]
