"""Cleans up between agent and verifier, so that the verifier finds nothing that the agent may have planted.

The sandbox's own programs do the removal. A root agent may have changed them, so the provider, which runs none of them,
checks the result. Whether an agent changed the programs that a verifier in the same sandbox uses cannot be detected:
use a separate verifier for that.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rollout.config.scratch import Scratch

from rollout_worker.sandboxes.errors import SandboxError, SandboxFileError
from rollout_worker.sandboxes.port import MIB, Sandbox
from rollout_worker.trials.faults import BY_AGENT
from rollout_worker.trials.making import admin
from rollout_worker.trials.port import TrialFault

TESTS, VERIFIER_LOGS = "/tests", "/logs/verifier"
PRELOAD = "/etc/ld.so.preload"
_CLEAN_S = 300.0
_MEND = """
for path in {paths}; do [ -d "$path" ] || {{ rm -rf "$path"; mkdir -p "$path"; }}; done
[ -w /tmp ] && chmod 1777 /tmp
"""
_LIST = """
for process in /proc/[0-9]*; do
  [ "${process#/proc/}" = $$ ] || { read -r name < "$process/comm" && echo "${process#/proc/} $name"; } 2>/dev/null
done
"""
_BROKEN = 98
# Programs that everything here needs. An image that has none of them could not have been made ready for the agent.
_CHECK = f"for program in rm mkdir chmod; do command -v $program >/dev/null || exit {_BROKEN}; done\n"
# Each program that a shell starts takes longer than all that it does here, so that one does it for all paths. What is a
# mount is emptied, and stays.
_EMPTY = """
empty() {{
  [ -d "$1" ] && [ ! -L "$1" ] && [ -r "$1" ] && [ -w "$1" ] && [ -x "$1" ] || return 1
  for left in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    if [ -e "$left" ] || [ -L "$left" ]; then return 1; fi
  done
}}
[ -L /logs ] && rm -f /logs
rm -rf {paths} 2>/dev/null
for path in {paths}; do
  if [ ! -e "$path" ] && [ ! -L "$path" ] || empty "$path"; then continue; fi
  {{ chmod -R u+rwX "$path"; rm -rf "$path"; }} 2>/dev/null
  [ -d "$path" ] && [ ! -L "$path" ] || rm -f "$path" 2>/dev/null
done
mkdir -p {paths}
chmod 0755 {paths} /logs
chown 0:0 {paths} 2>/dev/null
"""


async def mend(sandbox: Sandbox, *paths: str) -> None:
    """Recreate directories that commands need if an agent removed them. Raises TrialFault or SandboxError."""
    await _run(sandbox, _MEND.format(paths=_quoted("/tmp", *paths)))


async def clean(
    sandbox: Sandbox,
    *paths: str,
    mended: Sequence[str] = (),
    opened: Sequence[str] = (),
    removed: Sequence[str] = (),
    is_new: bool = False,
) -> None:
    """Make each of `paths` a new, empty directory owned by root, and those of `opened` writable by everyone.

    `mended` is as for `mend`. `removed` are our own files, which are not checked afterwards. `is_new` means that no
    agent has worked in it. Raises TrialFault if the agent has made this impossible, or SandboxError.
    """
    script = _EMPTY.format(paths=_quoted(*paths, *removed))
    if mended:
        script += _MEND.format(paths=_quoted("/tmp", *mended))
    if opened:
        script += f"chmod 0777 {_quoted(*opened)}\n"
    await _run(sandbox, script, is_new=is_new)
    names = await sandbox.names(*paths) or {}
    for path in paths:
        left = ", ".join(names[path]) if path in names else await _what_is_left(sandbox, path)
        if left:
            raise TrialFault(BY_AGENT, f"what the agent left in {path} cannot be removed: {left}")


async def _run(sandbox: Sandbox, script: str, *, is_new: bool = False) -> None:
    """Run a script. Raises TrialFault if the sandbox cannot, or can no longer, run it."""
    finished = await sandbox.exec(f"{_CHECK}{script}exit 0", cwd="/", user=admin(sandbox), timeout_s=_CLEAN_S)
    if finished.ok:
        return
    if finished.exit_code == _BROKEN:
        why = "rm, mkdir or chmod is missing"
    else:
        said = finished.stderr.text()[-300:].strip()
        why = said or f"{finished.how} {finished.exit_code if finished.signal is None else finished.signal}"
    if is_new:
        raise TrialFault("verifier_tests_copy_failed", f"what prepares the sandbox for the tests cannot run: {why}")
    raise TrialFault(BY_AGENT, f"the agent's work broke the sandbox: what cleans it cannot run any more: {why}")


def _quoted(*paths: str) -> str:
    return " ".join(map(shlex.quote, paths))


async def _what_is_left(sandbox: Sandbox, path: str) -> str:
    with Scratch("rollout-look-") as scratch:
        target = Path(scratch) / "found"
        try:
            moved = await sandbox.download(path, target, max_bytes=MIB)
        except SandboxFileError as error:
            return str(error.context.get("reason", error.message))
        if moved.skipped:
            return ", ".join(name for name, _ in moved.skipped[:3])
        return await asyncio.to_thread(_names, target)


def _names(target: Path) -> str:
    if not target.is_dir():
        return "a file"
    return ", ".join(sorted(one.name for one in target.iterdir())[:3])


@asynccontextmanager
async def killed_after(sandbox: Sandbox, seconds: float) -> AsyncGenerator[None]:
    """End everything in the sandbox after this time, so that waiting inside the block fails: processes of an agent may
    block our reads and writes of files."""

    async def kill() -> None:
        await asyncio.sleep(seconds)
        with suppress(SandboxError):
            await sandbox.kill()

    killing = asyncio.ensure_future(kill())
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.wait([killing])


async def running(sandbox: Sandbox) -> dict[int, str]:
    """Return the processes in the sandbox with their names, except the first one and the one that looks; empty if those
    of the host would be visible. Raises SandboxError."""
    if not sandbox.capabilities.own_processes:
        return {}
    finished = await sandbox.exec(_LIST, cwd="/", user=admin(sandbox), timeout_s=_CLEAN_S)
    rows = (line.partition(" ") for line in finished.stdout.text().splitlines())
    return {int(pid): name for pid, _, name in rows if pid.isdigit() and pid != "1"}


async def preload_of(sandbox: Sandbox) -> bytes | None:
    """Return the list of libraries that every program in the sandbox loads first, or None if there is no such file or
    it is not the sandbox's own. Raises SandboxError."""
    if not sandbox.capabilities.writable_root:
        return None
    try:
        return await sandbox.read_file(PRELOAD, max_bytes=MIB)
    except SandboxFileError as error:
        return None if error.context.get("reason") == "ENOENT" else b""


async def restore_preload(sandbox: Sandbox, before: bytes | None) -> bool:
    """Restore that list, and return whether the agent had changed it. Raises SandboxError."""
    if await preload_of(sandbox) != before:
        await sandbox.write_file(PRELOAD, before or b"")
        return True
    return False
