"""Waits until a sandbox is ready, like Docker's HEALTHCHECK."""

from __future__ import annotations

import asyncio
import time

from rollout.workloads.job.task_toml import Healthcheck

from rollout_worker.trials.faults import BY_AGENT, faults
from rollout_worker.trials.making import Made
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.streams import Streams

_GRACE_S = 10.0
# A deadline of the sandbox's own would end the very services that are waited for.
_LIMITED = 'if command -v timeout >/dev/null 2>&1; then exec timeout "$1" sh -c "$0"; else exec sh -c "$0"; fi'


async def until_healthy(check: Healthcheck, made: Made, streams: Streams, *, by_agent: bool = False) -> None:
    """Wait until the check succeeds. Raises TrialFault after `retries` consecutive failures outside the start period.

    `by_agent` is that of `faults`.
    """
    began, failed = time.monotonic(), 0
    command = ["/bin/sh", "-c", _LIMITED, check.command, f"{check.timeout_sec:g}"]
    while True:
        starting = time.monotonic() - began < check.start_period_sec
        with faults("environment_healthcheck_failed", "its health was checked", by_agent=by_agent):
            finished = await made.sandbox.exec(command, cwd=made.workdir, timeout_s=check.timeout_sec + _GRACE_S)
        if finished.ok:
            return
        last = finished.stderr.text()[-500:].strip() or finished.stdout.text()[-500:].strip()
        streams.say(f"health check: {finished.how} {finished.exit_code}: {last}")
        failed += not starting
        if failed >= check.retries:
            since = " after the agent worked in it" if by_agent else ""
            raise TrialFault(
                BY_AGENT if by_agent else "environment_healthcheck_failed",
                f"its health check failed {failed} times running{since}; the last time: {last or finished.exit_code}",
            )
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)
