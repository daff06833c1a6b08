"""Process of a C-ABI plugin: `python -m rollout_worker.hosting.cdylib_child FD`.

samples/cdylib/rollout_plugin.h specifies the ABI.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from typing import Any

from rollout.plugins import api
from rollout.processes import lifeline

from rollout_worker.hosting.framing import Refused, encode, payload_of, receive, refusal, with_payload


class Buf(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), ("len", ctypes.c_size_t), ("cap", ctypes.c_size_t)]


Call = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Buf)
)
FreeBuf = ctypes.CFUNCTYPE(None, Buf)


class Vtable(ctypes.Structure):
    _fields_ = [("abi_version", ctypes.c_uint32), ("name", ctypes.c_char_p), ("call", Call), ("free_buf", FreeBuf)]


class Library:
    def __init__(self, path: str, max_reply_bytes: int) -> None:
        try:
            self._library = ctypes.CDLL(path)
            factory = self._library.rollout_plugin_factory
        except (OSError, AttributeError) as e:
            raise Refused("start_refused", f"{path} is not a plugin library: {e}") from e
        factory.argtypes = []
        factory.restype = ctypes.c_void_p
        address = factory()
        if not address:
            raise Refused("start_refused", "rollout_plugin_factory returned NULL")
        # The version first: of another ABI, nothing behind it has a known place.
        abi = ctypes.c_uint32.from_address(address).value
        if abi != api.ABI_VERSION:
            raise Refused("abi_mismatch", f"cdylib ABI mismatch: got {abi}, expected {api.ABI_VERSION}")
        self._vtable = Vtable.from_address(address)
        if not self._vtable.call or not self._vtable.free_buf or not self._vtable.name:
            raise Refused("start_refused", "the vtable has a NULL name, call or free_buf")
        self.name: str = self._vtable.name.decode(errors="replace")
        self._max_reply_bytes = max_reply_bytes

    def call(self, method: str, payload: bytes) -> bytes:
        name, out = method.encode(), Buf(None, 0, 0)
        code: int = self._vtable.call(name, len(name), payload, len(payload), ctypes.byref(out))
        size = int(out.len)
        copied = b""
        if out.ptr:
            # Copied before free_buf: the two sides need not share an allocator.
            if size <= self._max_reply_bytes:
                copied = ctypes.string_at(out.ptr, size)
            self._vtable.free_buf(out)
        elif size:
            raise Refused("wrong_type", f"{method} gave a NULL buffer of {size} bytes")
        if size > self._max_reply_bytes:
            raise Refused("too_large", f"{method} gave {size} bytes, over the limit of {self._max_reply_bytes}")
        if code != 0:
            text = copied.decode(errors="replace") or "no message"
            raise Refused("unknown_method" if code == 1 else "plugin_error", f"{method} returned {code}: {text}")
        return copied


class Server:
    def __init__(self) -> None:
        self._library: Library | None = None

    def answer(self, method: str, payload: Any) -> Any:
        if method == api.INIT:
            self._library = Library(payload["path"], payload["max_reply_bytes"])
            return {"name": self._library.name, "abi": api.ABI_VERSION}
        if self._library is None:
            raise Refused("start_refused", "init must come first")
        if method == api.PREFLIGHT:
            return {"ok": True, "message": ""}
        if method == api.SHUTDOWN:
            return {}
        if isinstance(payload, bytes):
            return self._library.call(method, payload)
        reply = self._library.call(method, json.dumps(payload, separators=(",", ":")).encode())
        try:
            return json.loads(reply)
        except ValueError as e:
            raise Refused("wrong_type", f"{method} gave something that is not JSON: {reply[:60]!r}") from e


def main() -> None:
    lifeline.hold(os.getppid())
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    server = Server()
    while (frame := receive(connection)) is not None:
        try:
            data = encode(with_payload({"id": frame["id"]}, server.answer(frame["method"], payload_of(frame))))
        except Refused as e:
            data = refusal(frame["id"], e.code, str(e))
        except ValueError as e:  # json.loads took a NaN that strict JSON has not
            data = refusal(frame["id"], "wrong_type", str(e))
        connection.sendall(data)


if __name__ == "__main__":
    main()
