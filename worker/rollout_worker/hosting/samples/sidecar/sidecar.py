"""A sidecar in the standard library alone: any program that can bind a Unix socket will do.

Frames are a big-endian u32 length and UTF-8 JSON. A request is {"id", "method", "payload"}; the reply is {"id",
"payload"} or {"id", "error": {"code", "message"}}. Methods that begin with "rollout." are the host's own.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any


def init(**_manifest: Any) -> dict[str, str]:
    return {"name": "sample-sidecar", "version": "0.1.0"}


def overlap(completion: str, answer: str) -> float:
    """Return the shared words over all words (Jaccard)."""
    ours, theirs = set(completion.split()), set(answer.split())
    return len(ours & theirs) / len(ours | theirs) if ours | theirs else 1.0


def echo(**payload: Any) -> dict[str, Any]:
    return {"reward": None, **payload}


METHODS: dict[str, Callable[..., Any]] = {
    "rollout.init": init,
    "rollout.preflight": lambda: {"ok": True, "message": ""},
    "rollout.shutdown": dict,
    "overlap": overlap,
    "echo": echo,
}


def answer_to(frame: dict[str, Any]) -> dict[str, Any]:
    method = METHODS.get(frame["method"])
    if method is None:
        return {"id": frame["id"], "error": {"code": "unknown_method", "message": f"no method {frame['method']}"}}
    try:
        return {"id": frame["id"], "payload": method(**frame["payload"])}
    except (KeyError, TypeError, ValueError) as e:
        return {"id": frame["id"], "error": {"code": "bad_payload", "message": str(e)}}


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise SystemExit(0)
        data += piece
    return data


def main() -> None:
    server = socket.socket(socket.AF_UNIX)
    os.umask(0o177)  # the socket is 0600 from the start
    server.bind(os.environ["ROLLOUT_PLUGIN_SOCKET"])
    server.listen(1)
    connection, _ = server.accept()
    while True:
        (size,) = struct.unpack(">I", exactly(connection, 4))
        body = json.dumps(answer_to(json.loads(exactly(connection, size)))).encode()
        connection.sendall(struct.pack(">I", len(body)) + body)


if __name__ == "__main__":
    main()
