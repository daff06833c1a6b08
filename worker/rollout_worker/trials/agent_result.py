"""Reads what the agent of an experiment left in /agentlab/contract/out, trusting none of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollout.model.errors import InputError
from rollout.workloads.experiment.contracts import (
    EVENTS_BYTES_MAX,
    EVENTS_FILE,
    RESULT_BYTES_MAX,
    RESULT_FILE,
    AgentResult,
    Ids,
)

from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.errors import SandboxFileError
from rollout_worker.sandboxes.port import MIB, Sandbox
from rollout_worker.sandboxes.trees import Selection
from rollout_worker.trials.blobs import Blobs
from rollout_worker.trials.making import admin
from rollout_worker.trials.port import TrialFault

RESULT, EVENTS, TOO_LARGE = "contract/result.json", "contract/events.jsonl", "contract/result.too_large"
"""Names of the trial's files."""
MESSAGE_MAX = 4000
_SHORTEN = f'new=$(mktemp) && head -c {EVENTS_BYTES_MAX - 1024} {EVENTS_FILE} > "$new" && mv -f "$new" {EVENTS_FILE}'
"""Leaves room for the entry's header in a download of that size."""
_SHORTEN_S = 60.0
_WHY = {
    "too_large": f"is larger than {RESULT_BYTES_MAX // MIB} MiB",
    "EISDIR": "is a directory",
    "ELOOP": "is a link",
    "EINVAL": "is no regular file",
}


async def bring_result(sandbox: Sandbox, ids: Ids, blobs: Blobs, scratch: Path) -> AgentResult:
    """Return the agent's result, and keep it as the agent left it.

    Raises TrialFault if there is none, or it is unusable, SandboxError or OSError.
    """
    try:
        raw = await _read(sandbox, RESULT_FILE, RESULT_BYTES_MAX, scratch)
    except SandboxFileError as error:
        reason = str(error.context.get("reason"))
        if reason in ("ENOENT", "ENOTDIR"):
            raise TrialFault("agent_result_missing", f"the agent left no {RESULT_FILE}") from error
        what = _WHY.get(reason, f"cannot be read ({reason})")
        if reason == "too_large":
            await asyncio.to_thread(blobs.write, TOO_LARGE, f"{RESULT_FILE} {what}\n".encode())
        raise TrialFault("agent_result_invalid", f"{RESULT_FILE} {what}") from error
    raw = await asyncio.to_thread(blobs.write, RESULT, raw)
    try:
        result = await asyncio.to_thread(AgentResult.decode, raw)
    except InputError as error:
        raise TrialFault("agent_result_invalid", f"result.json: {error.message}"[:MESSAGE_MAX]) from error
    if result.ids != ids:
        raise TrialFault("agent_result_invalid", "result.json: ids: they must be those of the task, unchanged")
    return result


async def bring_events(sandbox: Sandbox, blobs: Blobs, scratch: Path) -> str | None:
    """Keep the agent's events, if it left some, and the first ones of a large file. Returns why not all could be kept,
    or None. Raises SandboxError or OSError."""
    remark = None
    try:
        try:
            raw = await _read(sandbox, EVENTS_FILE, EVENTS_BYTES_MAX, scratch)
        except SandboxFileError as error:
            if error.context.get("reason") != "too_large":
                raise
            await sandbox.exec(_SHORTEN, cwd="/", user=admin(sandbox), timeout_s=_SHORTEN_S)
            raw = await _read(sandbox, EVENTS_FILE, EVENTS_BYTES_MAX, scratch)
            raw = raw[: raw.rfind(b"\n") + 1]
            remark = f"events.jsonl is larger than {EVENTS_BYTES_MAX // MIB} MiB: only its first events are kept"
    except SandboxFileError as error:
        absent = error.context.get("reason") in ("ENOENT", "ENOTDIR")
        return None if absent else f"events.jsonl was not kept: {error.message}"
    await asyncio.to_thread(blobs.write, EVENTS, raw)
    return remark


async def _read(sandbox: Sandbox, path: str, most: int, scratch: Path) -> bytes:
    """Read a file. Raises SandboxFileError if it is not a file of a usable size."""
    copy = scratch / "out"
    try:
        await sandbox.download(path, copy, max_bytes=most, selection=Selection((), most, most, 0))
        if copy.is_dir():
            raise SandboxFileError(f"{path} is a directory", reason="EISDIR")
        return await asyncio.to_thread(copy.read_bytes)
    finally:
        await asyncio.to_thread(trees.remove, str(copy))
