"""A sidecar with every fault, chosen by the method; TEST_SIDECAR chooses one at start."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data


def main() -> None:
    how = os.environ.get("TEST_SIDECAR", "")
    if how == "exits":
        print("no licence found")
        sys.exit(5)
    if how == "deaf":
        time.sleep(1000)
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.environ["ROLLOUT_PLUGIN_SOCKET"])
    server.listen(1)
    connection, _ = server.accept()

    def send(body: bytes) -> None:
        connection.sendall(struct.pack(">I", len(body)) + body)

    while True:
        frame = json.loads(read(connection, struct.unpack(">I", read(connection, 4))[0]))
        number, method = frame["id"], frame["method"]

        def reply(value: object, number: int = number) -> None:
            send(json.dumps({"id": number, "payload": value}).encode())

        if method == "rollout.init":
            reply({"name": "liar" if how == "liar" else "faulty-sidecar", "version": "1"})
        elif method == "rollout.preflight":
            reply({"ok": how != "unready", "message": "no GPU"})
        elif method == "hang":
            time.sleep(1000)
        elif method == "malformed":
            send(b"{not json")
        elif method == "list":
            send(b"[1]")
        elif method == "wrong_id":
            reply(1.0, number + 1)
        elif method == "no_payload":
            send(json.dumps({"id": number}).encode())
        elif method == "huge":
            connection.sendall(struct.pack(">I", 0xFFFFFFF0) + b"x" * 1000)
        elif method == "unasked":
            reply(1.0)
            reply(1.0)
        elif method == "cut":
            connection.sendall(struct.pack(">I", 100) + b"half")
            sys.exit(0)
        elif method == "crash":
            os.abort()
        elif method == "text":
            reply("not a reward")
        elif method == "error":
            send(json.dumps({"id": number, "error": {"code": "timeout", "message": "I say so"}}).encode())
        elif method == "pid":
            reply(os.getpid())
        else:
            reply(1.0)


main()
