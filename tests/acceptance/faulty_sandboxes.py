"""A provider of sandboxes that fails where the environment of the task asks it to: `env = { FAULT = "destroy" }`.

It is `process`, whose sandboxes are otherwise as ever: nothing is left behind by its faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_worker.sandboxes.errors import SandboxGoneError, SandboxTeardownError
from rollout_worker.sandboxes.port import Finished, Sandbox, Spec, Transfer
from rollout_worker.sandboxes.process import ProcessProvider


class FaultyProvider(ProcessProvider):
    def __init__(self, state: Path, config: Mapping[str, Any]) -> None:
        super().__init__(state)

    async def create(self, spec: Spec, *, wait: bool = True) -> Sandbox:
        fault = spec.env.get("FAULT")
        if fault == "create":
            raise ZeroDivisionError("a fault of the provider that nobody thought of")
        sandbox = await super().create(spec, wait=wait)
        if fault is not None:
            spoil(sandbox, fault)
        return sandbox


def spoil(sandbox: Sandbox, fault: str) -> None:
    run, destroy, upload = sandbox.exec, sandbox.destroy, sandbox.upload

    async def failing_exec(command: Any, **options: Any) -> Finished:
        finished = await run(command, **options)
        if fault == "lost" and b"lost now" in finished.stdout.head:
            await destroy()
            raise SandboxGoneError
        return finished

    async def failing_destroy() -> None:
        await destroy()
        if fault == "destroy":
            raise SandboxTeardownError

    async def failing_upload(source: Path, target: str) -> Transfer:
        if fault == "tests" and target.rstrip("/") == "/tests":
            raise OSError(28, "No space left on device")
        return await upload(source, target)

    sandbox.exec = failing_exec  # pyright: ignore[reportAttributeAccessIssue]
    sandbox.destroy = failing_destroy
    sandbox.upload = failing_upload
