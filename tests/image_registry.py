"""A registry of images in the test's process, that can be told to misbehave. Own code: no package has a small one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from backports import zstd

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_PACKERS = {"gzip": (gzip.compress, "+gzip"), "zstd": (zstd.compress, "+zstd"), "plain": (bytes, "")}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def layer(*members: tuple[str, Any]) -> bytes:
    """(name, bytes of a file | None for a directory | (type, link))."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, what in members:
            member = tarfile.TarInfo(name)
            if what is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(what, tuple):
                member.type, member.linkname = what
                member.devmajor, member.devminor = 1, 3  # of a device, that of /dev/null
            else:
                member.size, member.mode = len(what), 0o4755
            tar.addfile(member, io.BytesIO(what) if isinstance(what, bytes) else None)
    return stream.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Registry:
    """`answers`: statuses given once each, before all else, with Retry-After: 0. `token`: what clients must have."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    answers: list[int] = field(default_factory=list)
    cut: int | None = None  # bytes after which the next layer breaks off
    token: str | None = None
    asked: list[str] = field(default_factory=list)
    port: int = 0

    def add(self, name: str, *layers: bytes, packed: str = "gzip", config: dict[str, Any] | None = None) -> str:
        """An image with these tars; its reference."""
        repository, _, tag = name.partition(":")
        machine = _MACHINES.get(platform.machine(), platform.machine())
        root = {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}
        described = {"architecture": machine, "os": "linux", "config": config or {}, "rootfs": root}
        described["history"] = [{"created_by": "a test"}] * len(layers)
        blob = self._blob(json.dumps(described).encode(), _CONFIG)
        pack, suffix = _PACKERS[packed]
        entries = [self._blob(pack(layer), f"{_LAYER}{suffix}") for layer in layers]
        manifest = json.dumps({"schemaVersion": 2, "mediaType": _MANIFEST, "config": blob, "layers": entries}).encode()
        self.manifests[f"{repository}/{digest(manifest)}"] = _MANIFEST, manifest
        here = {"mediaType": _MANIFEST, "digest": digest(manifest), "size": len(manifest)}
        there = {**here, "digest": digest(b"another machine's")}
        platforms = [("riscv64", there), (machine, here)]
        index = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": _INDEX,
                "manifests": [{**d, "platform": {"os": "linux", "architecture": a}} for a, d in platforms],
            }
        ).encode()
        self.manifests[f"{repository}/{tag}"] = _INDEX, index
        return f"127.0.0.1:{self.port}/{name}"

    def _blob(self, data: bytes, kind: str) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if request.path == "/token":
            return web.json_response({"token": self.token})
        if self.answers:
            return web.Response(status=self.answers.pop(0), headers={"Retry-After": "0"})
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            challenge = f'Bearer realm="http://127.0.0.1:{self.port}/token",service="test"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})
        if request.path == "/v2/":
            return web.Response()
        repository, kind, name = request.path.removeprefix("/v2/").rsplit("/", 2)
        if kind == "manifests":
            found = self.manifests.get(f"{repository}/{name}")
            return web.Response(status=404) if found is None else web.Response(body=found[1], content_type=found[0])
        data = self.blobs[name]
        if self.cut is not None and len(data) > self.cut:
            data, self.cut = data[: self.cut], None
        return web.Response(body=data)


@asynccontextmanager
async def registry() -> AsyncGenerator[Registry]:
    here = Registry()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", here.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    here.port = runner.addresses[0][1]
    try:
        yield here
    finally:
        await runner.cleanup()
