"""A process that removes an owner's containers when the owner ends, however it ends. Standard library only.

`main` has the arguments FD URL LABEL. FD is a pipe whose other end only the owner holds: it closes when the owner ends.
An owner that has removed its containers itself writes to it first.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import time
from urllib.parse import quote, urlsplit

_PATIENCE_S, _LOOK_S, _ANSWER_S = 120.0, 0.5, 60.0
_LOOKS = 4  # polls without a container: the last one requested may appear late


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_ANSWER_S)
        self.sock.connect(self._path)


def main() -> None:
    fd, url, label = sys.argv[1:4]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal's Ctrl-C: the owner decides
        signal.signal(number, signal.SIG_IGN)
    if not os.read(int(fd), 1):
        clear(url, label)


def clear(url: str, label: str) -> None:
    """Remove all containers with the label (`name=value`), as long as more may appear."""
    until = time.monotonic() + _PATIENCE_S
    looks = 0
    while looks < _LOOKS and time.monotonic() < until:
        looks += 1
        try:
            filters = quote(json.dumps({"label": [label]}))
            for container in json.loads(_ask(url, "GET", f"/containers/json?all=1&filters={filters}")):
                looks = 0
                _ask(url, "DELETE", f"/containers/{container['Id']}?force=1&v=1")
        except (OSError, http.client.HTTPException, ValueError):  # the engine is busy or away: retry
            looks = 0
        time.sleep(_LOOK_S)


def _ask(url: str, method: str, path: str) -> bytes:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        connection: http.client.HTTPConnection = _UnixConnection(parts.path)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port, timeout=_ANSWER_S)
    try:
        connection.request(method, path)
        return connection.getresponse().read()
    finally:
        connection.close()
