"""A child process of the worker, without its daemon: frames to it and from it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rollout.wire.v1 import work_pb2
from rollout_worker.attempts import Held, held_to_wire
from rollout_worker.executors.port import Run
from rollout_worker.processes.kinds import Kind

HEAD = struct.Struct("<IB")


class RunnerProcess:
    """Its scratch and the host's cache are below `directory`."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.cache = directory / "cache"
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollout_worker.processes.runner", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it ends its whole process group when this socket closes
        )
        theirs.close()
        init = {"run": asdict(run), "scratch": str(directory / "scratch"), "cache": str(self.cache), "secrets": []}
        self.send(Kind.INIT, json.dumps(init).encode())

    def send(self, kind: Kind, body: bytes) -> None:
        self.socket.sendall(HEAD.pack(len(body), kind) + body)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the process ended"
            data += more
        return data

    def frame(self) -> tuple[int, bytes]:
        size, kind = HEAD.unpack(self.read(HEAD.size))
        return kind, self.read(size)

    def deliver(self, held: list[Held]) -> None:
        for group in held_to_wire(held, {}):
            self.send(Kind.ASSIGN, group.SerializeToString())

    def results(self, count: int) -> list[work_pb2.ResultGroup]:
        found: list[work_pb2.ResultGroup] = []
        while sum(len(g.seq) for g in found) < count:
            kind, body = self.frame()
            assert kind == Kind.RESULTS
            found.append(work_pb2.ResultGroup.FromString(body))
        return found

    def close(self) -> None:
        self.socket.close()
        self.process.wait(timeout=60)
