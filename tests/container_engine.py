"""A container engine in the test's process: as much of Docker's API as sandboxes use, without isolation.

Commands run on this host, in sessions of their own; a container's files are a directory. Own code: no package has one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import struct
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web


@dataclass
class Container:
    config: dict[str, Any]
    root: Path
    running: bool = False
    starts: int = 0
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def end(self) -> None:
        self.running = False
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@dataclass
class Exec:
    container: Container
    config: dict[str, Any]
    process: asyncio.subprocess.Process | None = None


@dataclass
class ContainerEngine:
    """`faults`: (method, end of the path) to the status that it answers. `build`: what a build streams, or how long it
    takes; `images`: names to their configuration."""

    directory: Path
    containers: dict[str, Container] = field(default_factory=dict)
    execs: dict[str, Exec] = field(default_factory=dict)
    images: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[tuple[str, str], int] = field(default_factory=dict)
    build: list[dict[str, Any]] = field(default_factory=list)
    build_s: float = 0.0
    pull: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    frame: int = 1 << 16  # bytes of output at a time
    pids: int = 1  # that run in each container
    cannot_start: int = 0  # commands from now on that are not started

    @property
    def url(self) -> str:
        return f"unix://{self.directory}/engine.sock"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/v1.41")
        self.asked.append(f"{request.method} {path}")
        for (method, end), status in self.faults.items():
            if request.method == method and path.endswith(end):
                return web.json_response({"message": f"told to answer {status}"}, status=status)
        kind, _, rest = path.strip("/").partition("/")
        handle = getattr(self, f"_{kind.replace('_ping', 'ping')}", None)
        if handle is None:
            return web.json_response({"message": "no such page"}, status=404)
        return await handle(request, rest)

    async def _ping(self, request: web.Request, rest: str) -> web.StreamResponse:
        return web.Response(text="OK", headers={"Api-Version": "1.41"})

    async def _version(self, request: web.Request, rest: str) -> web.StreamResponse:
        return web.json_response({"ApiVersion": "1.41"})

    async def _info(self, request: web.Request, rest: str) -> web.StreamResponse:
        limits = {"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True}
        return web.json_response({"OSType": "linux", "NCPU": 4, "MemTotal": 8 << 30, **limits})

    async def _networks(self, request: web.Request, rest: str) -> web.StreamResponse:
        return web.json_response({"Id": rest})

    async def _images(self, request: web.Request, rest: str) -> web.StreamResponse:
        if rest == "create":
            if self.pull:
                return web.json_response(self.pull)
            name = f"{request.query['fromImage']}:{request.query.get('tag', '')}".rstrip(":")
            self.images[name] = {}
            return web.json_response({"status": "done"})
        name = rest.removesuffix("/json")
        name = name if ":" in name else f"{name}:latest"
        if name not in self.images:
            return web.json_response({"message": f"no such image: {name}"}, status=404)
        return web.json_response({"Id": f"sha256:{name}", "Config": self.images[name]})

    async def _build(self, request: web.Request, rest: str) -> web.StreamResponse:
        await request.read()
        await asyncio.sleep(self.build_s)
        if not any("error" in piece for piece in self.build):
            self.images[request.query["t"]] = {"Env": ["BUILT=1"], "WorkingDir": "/"}
        return web.Response(body="\r\n".join(map(json.dumps, self.build)).encode(), content_type="application/json")

    async def _containers(self, request: web.Request, rest: str) -> web.StreamResponse:
        if rest == "create":
            name = request.query["name"]
            root = self.directory / name
            root.mkdir()
            self.containers[name] = Container(await request.json(), root)
            return web.json_response({"Id": name}, status=201)
        if rest == "json":
            label = json.loads(request.query["filters"])["label"][0].split("=")
            found = [
                {"Id": name, "Names": [f"/{name}"], "Labels": one.config["Labels"]}
                for name, one in self.containers.items()
                if one.config["Labels"].get(label[0]) == label[1]
            ]
            return web.json_response(found)
        name, _, verb = rest.partition("/")
        one = self.containers.get(name)
        if one is None:
            return web.json_response({"message": f"No such container: {name}"}, status=404)
        if request.method == "DELETE":
            one.end()
            del self.containers[name]
            return web.Response(status=204)
        return await getattr(self, f"_{verb}_container")(request, one)

    async def _start_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        one.running = True
        one.starts += 1
        return web.Response(status=204)

    async def _kill_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        one.end()
        return web.Response(status=204)

    async def _wait_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        return web.json_response({"StatusCode": 137})

    async def _stats_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        return web.json_response({"pids_stats": {"current": self.pids}})

    async def _json_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        size = sum(path.stat().st_size for path in one.root.rglob("*") if path.is_file())
        return web.json_response({"State": {"Running": one.running, "Pid": 0}, "SizeRw": size})

    async def _exec_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        if not one.running:
            return web.json_response({"message": "it is not running"}, status=409)
        number = str(len(self.execs))
        self.execs[number] = Exec(one, await request.json())
        return web.json_response({"Id": number}, status=201)

    async def _exec(self, request: web.Request, rest: str) -> web.StreamResponse:
        number, _, verb = rest.partition("/")
        one = self.execs[number]
        if verb == "json":
            code = one.process.returncode if one.process else None
            code = 128 - code if code is not None and code < 0 else code
            return web.json_response({"Running": code is None, "ExitCode": code, "ProcessConfig": {"tty": False}})
        if one.config["User"] == "no-such-user":
            return web.json_response({"message": "unable to find user no-such-user"}, status=400)
        await self._stream(request, one)
        return web.Response()

    async def _stream(self, request: web.Request, one: Exec) -> None:
        """The connection is no longer HTTP: frames of output there, standard input here."""
        transport = request.transport
        assert transport is not None
        transport.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        inside = os.dup(transport.get_extra_info("socket").fileno())
        transport.pause_reading()
        environment = dict(pair.split("=", 1) for pair in [*one.container.config["Env"], *(one.config["Env"] or [])])
        command = one.config["Cmd"]
        if self.cannot_start:
            self.cannot_start -= 1
            command = ["/bin/sh", "-c", "echo runtime: no more processes >&2; exit 125"]
        one.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "HOME": str(one.container.root), **environment},
            start_new_session=True,
        )
        one.container.processes.append(one.process)
        feeding = asyncio.ensure_future(_feed(inside, one.process, one.config["AttachStdin"]))

        async def pump(kind: int, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(self.frame):
                transport.write(struct.pack(">BxxxL", kind, len(data)) + data)

        assert one.process.stdout is not None
        assert one.process.stderr is not None
        await asyncio.gather(pump(1, one.process.stdout), pump(2, one.process.stderr))
        await one.process.wait()
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        os.close(inside)
        transport.close()

    async def _archive_container(self, request: web.Request, one: Container) -> web.StreamResponse:
        path = one.root / request.query["path"].lstrip("/")
        if request.method == "PUT":
            with tarfile.open(fileobj=io.BytesIO(await request.read())) as tar:
                tar.extractall(path, filter="tar")
            return web.Response()
        if not os.path.lexists(path):
            return web.json_response({"message": "Could not find the file"}, status=404)
        status = path.lstat()
        kind = 1 << 31 if path.is_dir() else 1 << 27 if path.is_symlink() else 0
        told = {"name": path.name, "size": status.st_size, "mode": kind | status.st_mode & 0o777, "linkTarget": ""}
        headers = {"X-Docker-Container-Path-Stat": base64.b64encode(json.dumps(told).encode()).decode()}
        if request.method == "HEAD":
            return web.Response(headers=headers)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            tar.add(path, path.name)
        return web.Response(body=stream.getvalue(), headers=headers)


async def _feed(inside: int, process: asyncio.subprocess.Process, wanted: bool) -> None:
    assert process.stdin is not None
    loop = asyncio.get_running_loop()
    while wanted:
        ready = loop.create_future()
        loop.add_reader(inside, lambda ready=ready: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(inside)
        data = os.read(inside, 1 << 16)
        if not data:
            break
        process.stdin.write(data)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
    process.stdin.close()


@asynccontextmanager
async def container_engine(directory: Path) -> AsyncGenerator[ContainerEngine]:
    here = ContainerEngine(directory)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", here.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, f"{directory}/engine.sock").start()
    try:
        yield here
    finally:
        for one in here.containers.values():
            one.end()
        await runner.cleanup()
