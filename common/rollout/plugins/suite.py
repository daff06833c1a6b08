"""What every plugin must withstand. Authors run it on theirs: `python -m rollout.plugins.check MANIFEST`, or in pytest:

from rollout.plugins.check import plugin_host
from rollout.plugins.suite import check_plugin

async def test_my_plugin():
    assert not [c for c in await check_plugin("rollout-plugin.toml", plugin_host()) if not c.passed]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout.model.errors import PluginError, RolloutError
from rollout.plugins.manifest import Manifest, load_manifest, verify_pin

CALL_S = 60.0
REPLACED = frozenset({"timeout", "crashed", "flood", "bad_frame"})
"""Reasons that cost the plugin its process."""


class Host(Protocol):
    """The part of `rollout_worker.hosting.host.PluginHost` that the checks use."""

    async def load(self, manifest_path: str | Path) -> Manifest: ...
    async def call(self, name: str, method: str, payload: dict[str, Any] | bytes, timeout_s: float) -> Any: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str = ""


class _Broken(Exception):
    """A check that failed, in words."""


async def check_plugin(manifest_path: str | Path, host: Host, *, timeout_s: float = CALL_S) -> list[Check]:
    """Return every check with its outcome, without those that need a loaded plugin if it does not load."""
    checks: list[Check] = []

    async def run(name: str, body: Callable[[], Awaitable[str]]) -> bool:
        try:
            checks.append(Check(name, True, await body()))
        except (RolloutError, _Broken) as e:
            checks.append(Check(name, False, str(e)))
        return checks[-1].passed

    async def manifest_ok() -> str:
        await asyncio.to_thread(lambda: verify_pin(load_manifest(manifest_path)))
        return ""

    async def loads() -> str:
        await host.load(manifest_path)
        return ""

    try:
        if await run("the manifest is valid and its hash matches", manifest_ok) and await run("it starts", loads):
            probes = _Probes(await asyncio.to_thread(load_manifest, manifest_path), host, timeout_s)
            for index, example in enumerate(probes.manifest.examples):
                await run(f"example {index + 1}: {example.method}", lambda i=index: probes.example(i))
            await run("equal calls give equal answers", probes.same_twice)
            await run("an unknown method is refused, and only that", probes.unknown_method)
            await run("unexpected arguments are refused, and only that", probes.bad_arguments)
            await run("calls at once do not mix", probes.at_once)
    finally:

        async def ends() -> str:
            await asyncio.wait_for(host.close(), timeout_s)
            return ""

        await run("it ends when it is told to", ends)
    return checks


class _Probes:
    def __init__(self, manifest: Manifest, host: Host, timeout_s: float) -> None:
        self.manifest = manifest
        self._host = host
        self._timeout_s = timeout_s

    async def _call(self, method: str, payload: dict[str, Any]) -> Any:
        return await self._host.call(self.manifest.name, method, payload, self._timeout_s)

    async def example(self, index: int) -> str:
        example = self.manifest.examples[index]
        value = await self._call(example.method, example.payload)
        if example.expect is not None and value != example.expect:
            raise _Broken(f"gave {value!r}, the manifest expects {example.expect!r}")
        return repr(value)[:60]

    def _repeatable(self) -> list[int]:
        # A step moves its episode on; only whole calls can be repeated.
        return [] if self.manifest.kind == "env-harness" else list(range(len(self.manifest.examples)))

    async def same_twice(self) -> str:
        for index in self._repeatable():
            example = self.manifest.examples[index]
            one, two = [await self._call(example.method, example.payload) for _ in range(2)]
            if self.manifest.kind == "reward" and one != two:
                raise _Broken(f"{example.method} gave {one!r}, then {two!r}: runs cannot be reproduced with it")
        return f"{len(self._repeatable())} examples"

    async def unknown_method(self) -> str:
        return await self._refused("no_such_method_anywhere", {})

    async def bad_arguments(self) -> str:
        method = self.manifest.examples[0].method if self.manifest.examples else "no_such_method_anywhere"
        return await self._refused(method, {"no such argument": [1]}, may_answer=True)

    async def _refused(self, method: str, payload: dict[str, Any], *, may_answer: bool = False) -> str:
        try:
            await self._call(method, payload)
        except PluginError as e:
            if e.context.get("reason") in REPLACED:
                raise _Broken(f"it did not survive: {e}") from e
            return str(e.context.get("reason", ""))
        if may_answer:
            return "answered"
        raise _Broken(f"it answered a call of {method}, which it cannot have")

    async def at_once(self) -> str:
        indexes = self._repeatable() * 4
        examples = [self.manifest.examples[i] for i in indexes]
        alone = {
            i: await self._call(self.manifest.examples[i].method, self.manifest.examples[i].payload) for i in indexes
        }
        together = await asyncio.gather(*[self._call(e.method, e.payload) for e in examples])
        if self.manifest.kind == "reward":
            for index, value in zip(indexes, together, strict=True):
                if value != alone[index]:
                    raise _Broken(f"{self.manifest.examples[index].method} gave {value!r} instead of {alone[index]!r}")
        return f"{len(indexes)} calls"
