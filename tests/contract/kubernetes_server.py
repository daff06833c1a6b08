"""A Kubernetes API server as far as sandboxes need one. Its pods are processes of this machine in namespaces of their
own, made with bubblewrap; as with a kubelet, an exec whose connection breaks goes on, and its stdin is never closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

CAN_RUN = os.geteuid() == 0 and shutil.which("bwrap") is not None and shutil.which("nsenter") is not None
WHY_NOT = "the pods of the test's API server need root, bubblewrap and nsenter"

WAIT = ": > /tmp/.up; while :; do sleep 1000 & wait; done"
DROPPED = "--bounding-set=-sys_admin,-mknod,-sys_ptrace"


def start_box(directory: Path, *, closed: bool) -> int:
    """A root with this machine's programs; the pid of its first process."""
    (directory / "info").touch()
    arguments = ["bwrap", "--unshare-pid", "--unshare-ipc", *(["--unshare-net"] if closed else [])]
    for name in ("usr", "etc"):
        arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for name in ("bin", "sbin", "lib", "lib64"):
        arguments += ["--symlink", f"usr/{name}", f"/{name}"]
    arguments += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev", "--tmpfs", "/tmp"]
    arguments += ["--tmpfs", "/root", "--chmod", "755", "/root", "--as-pid-1", "--info-fd", "3", "/bin/sh", "-c", WAIT]
    quiet = " < /dev/null > /dev/null 2>&1"
    subprocess.run(
        ["sh", "-c", f'exec 3> "$0"; setsid "$@" {quiet} &', str(directory / "info"), *arguments], check=True
    )
    while not (found := re.search(r'"child-pid": (\d+)', (directory / "info").read_text())):
        time.sleep(0.005)
    while not Path(f"/proc/{found[1]}/root/tmp/.up").exists():
        time.sleep(0.005)
    return int(found[1])


def enter_box(pid: int, environment: dict[str, str]) -> list[str]:
    variables = [f"{name}={value}" for name, value in environment.items()]
    inside = ["setpriv", DROPPED, "--inh-caps=-all", "env", "-i", *variables]
    return ["nsenter", "-t", str(pid), "-m", "-p", "-n", "-i", "-r", "-w", *inside]


@dataclass
class Pod:
    manifest: dict[str, Any]
    pid: int = 0
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.manifest["metadata"]["name"]

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.pid = 0


@dataclass
class FakeKubernetes:
    """`cpus`: of its only node. `enforces`: network policies. `drop_after_s`: connections of exec last that long.
    `drop_bytes`: the next exec's connection breaks after so many bytes of output. `busy`: answers of 503 to come."""

    cpus: float = 8
    enforces: bool = True
    drop_after_s: float | None = None
    drop_bytes: int | None = None
    busy: int = 0
    drops: int = 0
    execs: int = 0
    pods: dict[str, Pod] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def __aenter__(self) -> FakeKubernetes:
        self._directory = Path(tempfile.mkdtemp(prefix="kubernetes-"))
        app = web.Application(middlewares=[self._middle])
        base = "/api/v1/namespaces/evals/pods"
        nets = "/apis/networking.k8s.io/v1/namespaces/evals/networkpolicies"
        app.add_routes(
            [
                web.get(base, self._list_pods),
                web.post(base, self._create_pod),
                web.get(f"{base}/{{name}}", self._get_pod),
                web.delete(f"{base}/{{name}}", self._delete_pod),
                web.get(f"{base}/{{name}}/exec", self._exec),
                web.get(nets, self._list_policies),
                web.post(nets, self._create_policy),
                web.delete(f"{nets}/{{name}}", self._delete_policy),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = int(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        self.kubeconfig = self._directory / "config"
        named = {"cluster": "c", "user": "u", "namespace": "evals"}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "x",
                    "contexts": [{"name": "x", "context": named}],
                    "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "u", "user": {"token": "secret"}}],
                }
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.end()
        await self._runner.cleanup()
        shutil.rmtree(self._directory)

    @property
    def config(self) -> dict[str, Any]:
        return {"kubeconfig": str(self.kubeconfig), "default_image": "debian:12"}

    def evict(self, name: str, reason: str = "Evicted") -> None:
        self.pods[name].end()
        self.pods[name].status = {"phase": "Failed", "reason": reason, "message": "The node was low on resource."}

    @web.middleware
    async def _middle(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer secret":
            return _refuse(401, "Unauthorized")
        if self.busy > 0 and "/exec" not in request.path:
            self.busy -= 1
            return _refuse(503, "ServiceUnavailable")
        return await handler(request)

    # Pods

    async def _create_pod(self, request: web.Request) -> web.Response:
        manifest = await request.json()
        name = manifest["metadata"]["name"]
        if name in self.pods:
            return _refuse(409, "AlreadyExists")
        pod = self.pods[name] = Pod(manifest)
        self._settle(pod)
        return web.json_response(self._shown(pod), status=201)

    def _settle(self, pod: Pod) -> None:
        container = pod.manifest["spec"]["containers"][0]
        wanted = float(container["resources"]["requests"]["cpu"].removesuffix("m")) / 1000
        if wanted > self.cpus:
            why = f"0/1 nodes are available: 1 Insufficient cpu ({wanted:g})."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
            pod.status = {"phase": "Pending", "conditions": [condition]}
        elif "nobody/" in container["image"]:
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
            pod.status = {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
        elif not pod.pid:
            place = self._directory / pod.name
            place.mkdir()
            closed = self.enforces and pod.name in self.policies
            pod.pid = start_box(place, closed=closed)
            pod.status = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}

    def _shown(self, pod: Pod) -> dict[str, Any]:
        return {**pod.manifest, "status": pod.status}

    async def _list_pods(self, request: web.Request) -> web.Response:
        return _list([self._shown(pod) for pod in self.pods.values()], request)

    async def _get_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _refuse(404, "NotFound")
        if pod.status.get("phase") == "Pending":
            self._settle(pod)
        return web.json_response(self._shown(pod))

    async def _delete_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _refuse(404, "NotFound")
        assert (await request.json())["gracePeriodSeconds"] == 0
        pod.end()
        pod.manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        asyncio.get_running_loop().call_later(0.05, self.pods.pop, pod.name, None)
        return web.json_response(self._shown(pod))

    # Policies

    async def _create_policy(self, request: web.Request) -> web.Response:
        policy = await request.json()
        self.policies[policy["metadata"]["name"]] = policy
        return web.json_response(policy, status=201)

    async def _list_policies(self, request: web.Request) -> web.Response:
        return _list(list(self.policies.values()), request)

    async def _delete_policy(self, request: web.Request) -> web.Response:
        found = self.policies.pop(request.match_info["name"], None)
        return web.json_response(found) if found else _refuse(404, "NotFound")

    # Exec

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _refuse(404, "NotFound")
        if not pod.pid:
            return _refuse(500, "InternalError")
        self.execs += 1
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        environment |= {"KUBERNETES_SERVICE_PORT": str(self.port), "FROM_IMAGE": "yes"}
        command = enter_box(pod.pid, environment) + request.query.getall("command")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        limit, self.drop_bytes = self.drop_bytes, None
        serving = asyncio.ensure_future(_serve(socket, process, limit))
        done, _ = await asyncio.wait([serving], timeout=self.drop_after_s)
        if not done or serving.result() == "cut":
            self.drops += 1
            serving.cancel()
            assert request.transport is not None
            request.transport.abort()  # the process goes on
        return socket


async def _serve(socket: web.WebSocketResponse, process: asyncio.subprocess.Process, limit: int | None) -> str:
    sent = 0

    async def pump(channel: int, stream: asyncio.StreamReader) -> bool:
        nonlocal sent
        while data := await stream.read(30_000):
            if limit is not None and channel == 1 and sent + len(data) > limit:
                await socket.send_bytes(bytes([channel]) + data[: limit - sent])
                return False
            sent += len(data) if channel == 1 else 0
            await socket.send_bytes(bytes([channel]) + data)
        return True

    async def feed() -> None:
        assert process.stdin is not None
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == b"\0":
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(message.data[1:])
                    await process.stdin.drain()

    feeding = asyncio.ensure_future(feed())
    try:
        assert process.stdout is not None and process.stderr is not None
        try:
            whole = await asyncio.gather(pump(1, process.stdout), pump(2, process.stderr))
        except ConnectionError:
            return "left"
        if not all(whole):
            return "cut"
        code = await process.wait()
        status = {"status": "Success"} if code == 0 else {"status": "Failure", "reason": "NonZeroExitCode"}
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\3" + json.dumps(status).encode())
            await socket.close()
        return "whole"
    finally:
        feeding.cancel()


def _list(items: list[dict[str, Any]], request: web.Request) -> web.Response:
    wanted = dict(part.split("=") for part in request.query["labelSelector"].split(","))
    return web.json_response(
        {"items": [item for item in items if wanted.items() <= item["metadata"]["labels"].items()]}
    )


def _refuse(status: int, reason: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "reason": reason, "code": status}, status=status)
