"""Slot process of a python plugin: `python -m rollout_worker.hosting.python_child FD`.

User code runs only here. The process ends when the host's end of the socket closes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, cast

from rollout.plugins import api
from rollout.processes import lifeline
from rollout.processes.interpreter import import_from

from rollout_worker.hosting.framing import Refused, encode, payload_of, receive, refusal, with_payload

MAX_EPISODES = 1024


class Target:
    """Resolves methods for this kind of plugin."""

    def __init__(self, init: dict[str, Any]) -> None:
        self.kind: str = init["kind"]
        import_from(init["path"])
        module = importlib.import_module(init["module"])
        self._config: dict[str, Any] = init["config"]
        self._factory: Callable[..., Any] | None = getattr(module, init["factory"]) if init["factory"] else None
        self._episodes: dict[str, Any] = {}
        self._object: Any = module
        if self._factory is not None and self.kind != "env-harness":
            self._object = self._make()
        if self._factory is None and self.kind == "env-harness":
            raise Refused("start", "an env-harness needs entry.python.factory: it makes an environment per episode")

    def _make(self) -> Any:
        assert self._factory is not None
        wants_config = "config" in inspect.signature(self._factory).parameters
        return self._factory(config=self._config) if wants_config else self._factory()

    def find(self, method: str, payload: Any) -> tuple[Callable[..., Any], Any]:
        if self.kind == "env-harness":
            return self._of_episode(method, payload)
        function = getattr(self._object, method, None)
        public = callable(function) and not method.startswith("_")
        if public and inspect.ismodule(self._object) and self.kind == "reward":
            public = api.is_reward(function)
        if not public:
            raise Refused("unknown_method", f"the plugin has no method {method!r}")
        return cast("Callable[..., Any]", function), payload

    def _of_episode(self, method: str, payload: Any) -> tuple[Callable[..., Any], Any]:
        if method not in ("reset", "step", "close"):
            raise Refused("unknown_method", f"an environment has reset, step and close, not {method!r}")
        fields = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
        episode = fields.get("episode_id")
        if not isinstance(episode, str):
            raise Refused("bad_payload", f"{method} needs the keyword episode_id")
        if method == "reset":
            if len(self._episodes) >= MAX_EPISODES:
                raise Refused("too_many", f"{MAX_EPISODES} episodes are open; close some")
            environment = self._episodes[episode] = self._make()
            return environment.reset, fields
        environment = self._episodes.get(episode) if method == "step" else self._episodes.pop(episode, None)
        if environment is None:
            raise Refused("unknown_episode", f"episode {episode!r} is not open here: reset it first")
        return getattr(environment, method), {k: v for k, v in fields.items() if k != "episode_id"}


async def invoke(target: Target, method: str, payload: Any, *, in_thread: bool) -> Any:
    function, payload = target.find(method, payload)
    named = cast("dict[str, Any]", payload) if isinstance(payload, dict) else {}
    placed: tuple[Any, ...] = () if isinstance(payload, dict) else (payload,)
    try:
        inspect.signature(function).bind(*placed, **named)
    except TypeError as e:
        raise Refused("bad_payload", f"{method} cannot take these arguments: {e}") from e
    if in_thread and not inspect.iscoroutinefunction(function):
        value = await asyncio.to_thread(function, *placed, **named)
    else:
        value = function(*placed, **named)
    return await value if inspect.isawaitable(value) else value


class Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._target: Target | None = None
        self._threads = False
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while (frame := await loop.run_in_executor(None, receive, self._connection)) is not None:
            task = loop.create_task(self._answer(frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        os._exit(0)  # whatever user threads are still at it

    async def _answer(self, frame: dict[str, Any]) -> None:
        number, method = frame["id"], frame["method"]
        try:
            value = await self._handle(method, payload_of(frame))
            data = self._encode(number, method, value)
        except Refused as e:
            data = refusal(number, e.code, str(e))
        except Exception as e:  # noqa: BLE001 - user code raises what it likes; the caller gets it typed
            where = traceback.extract_tb(e.__traceback__)[-1]
            text = f"{method} raised {type(e).__name__}: {e} ({where.filename}:{where.lineno})"
            data = refusal(number, "plugin_error", text[:2000])
        async with self._sending:
            await asyncio.to_thread(self._connection.sendall, data)

    @staticmethod
    def _encode(number: int, method: str, value: Any) -> bytes:
        try:
            return encode(with_payload({"id": number}, value))
        except (TypeError, ValueError, RecursionError) as e:
            text = f"{method} returned {type(value).__name__}, which is not JSON: {e}"
            raise Refused("wrong_type", text) from e

    async def _handle(self, method: str, payload: Any) -> Any:
        if method == api.INIT:
            self._target = Target(payload)
            self._threads = payload["concurrency"] > 1
            return {"name": payload["name"], "protocol": api.PROTOCOL_VERSION}
        if method == api.PREFLIGHT:
            return {"ok": True, "message": ""}
        if method == api.SHUTDOWN:
            return {}
        if self._target is None:
            raise Refused("start", "init must come first")
        return await invoke(self._target, method, payload, in_thread=self._threads)


def main() -> None:
    lifeline.hold(os.getppid())
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    asyncio.run(Server(connection).run())


if __name__ == "__main__":
    main()
