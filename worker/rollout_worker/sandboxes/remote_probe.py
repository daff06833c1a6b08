"""Probes, from inside, of what a remote sandbox enforces."""

from __future__ import annotations

import contextlib

from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.port import LIMITS, Enforcement, LimitName
from rollout_worker.sandboxes.remote_sandbox import RemoteSandbox

_NOBODY = 65534

CONNECT = """
connects() {
  if command -v bash > /dev/null; then timeout 4 bash -c "exec 3<>/dev/tcp/$1/$2" 2> /dev/null; return; fi
  if command -v nc > /dev/null; then nc -w 4 "$1" "$2" < /dev/null > /dev/null 2>&1; return; fi
  if command -v python3 > /dev/null; then
    python3 -c "import socket; socket.create_connection(('$1', $2), 4)" 2> /dev/null; return
  fi
  exit 77
}
"""
"""Shell function that tests whether a connection succeeds. It exits with 77 if there is no program to try it with."""


async def text_of(sandbox: RemoteSandbox, script: str) -> str:
    """Return what our script prints. It is not run as a sandbox command, because that costs three calls instead of
    one."""
    return (await sandbox.shell.run(script)).out.decode(errors="replace").strip()


async def changes_users(sandbox: RemoteSandbox) -> bool:
    """Return whether commands can run as another user, in the home directory too."""
    with contextlib.suppress(SandboxRefusedError):
        finished = await sandbox.exec("id -u", user=_NOBODY)
        return finished.ok and finished.stdout.text().strip() == str(_NOBODY)
    return False


async def limits_of(sandbox: RemoteSandbox) -> dict[LimitName, Enforcement]:
    """Return the limits that the sandbox's control group, as seen from inside, sets to what was declared."""
    found: dict[LimitName, Enforcement] = dict.fromkeys(LIMITS, "no")
    declared = sandbox.spec.limits
    script = (
        "cd /sys/fs/cgroup 2> /dev/null; for f in memory.max cpu.max pids.max; do cat $f 2> /dev/null || echo -; done"
    )
    memory, cpu, pids = (await text_of(sandbox, script)).splitlines()
    if memory.isdigit() and int(memory) <= declared.memory_mb << 20:
        found["memory"] = "kernel"
    quota, _, period = cpu.partition(" ")
    if quota.isdigit() and int(quota) <= declared.cpus * int(period) * 1.01:
        found["cpus"] = "kernel"
    if pids.isdigit() and int(pids) <= declared.pids:
        found["pids"] = "kernel"
    return found
