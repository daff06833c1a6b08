"""Cases on what a deadline kills and what it keeps."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_worker.sandboxes.conformance.suite import (
    PATIENCE_S,
    Bench,
    NotConformingError,
    case,
    needs,
    on_shared,
    output_of,
    raises,
    same,
    still_at,
    true,
)
from rollout_worker.sandboxes.errors import (
    CommandFailedError,
)
from rollout_worker.sandboxes.port import (
    Limits,
    Sandbox,
    Stream,
)


@on_shared
async def a_deadline_keeps_what_was_printed(bench: Bench, sandbox: Sandbox) -> None:
    finished = await sandbox.exec("echo before; echo err >&2; sleep 1000", timeout_s=0.3)
    same((finished.how, finished.exit_code, finished.signal), ("timed_out", None, None), "how it ended")
    same((finished.stdout.text(), finished.stderr.text()), ("before\n", "err\n"), "what was printed")
    true(finished.duration_s < PATIENCE_S, "it was not ended in time")
    async with raises(CommandFailedError):
        finished.check()


@on_shared
async def a_deadline_ends_what_ignores_sigterm(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    command = f"trap '' TERM INT HUP; while :; do echo x >> '{place}/beats'; sleep 0.02; done"
    same((await sandbox.exec(command, timeout_s=0.4)).how, "timed_out", "how it ended")
    await still_at(sandbox, f"{place}/beats")


@on_shared
async def a_deadline_ends_daemons(bench: Bench, sandbox: Sandbox) -> None:
    needs(sandbox.capabilities.ends_daemons, "daemons are not found again")
    place = await bench.inside(sandbox)
    beat = f"while :; do echo x >> {place}/beats; sleep 0.02; done"
    # In a session of its own, its parents gone, without our environment, its streams closed.
    daemon = f"(setsid env -i /bin/sh -c '({beat}) &' < /dev/null > /dev/null 2>&1 &)"
    wait = f"while [ ! -s {place}/beats ]; do sleep 0.02; done"
    same((await sandbox.exec(f"{daemon}; {wait}; sleep 1000", timeout_s=1.0)).how, "timed_out", "how it ended")
    await still_at(sandbox, f"{place}/beats")


@on_shared
async def a_deadline_ends_earlier_commands_processes(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    await sandbox.exec(f"setsid sh -c 'while :; do echo x >> {place}/beats; sleep 0.02; done' >/dev/null 2>&1 &")
    (await sandbox.exec(f"while [ ! -s {place}/beats ]; do sleep 0.02; done", timeout_s=PATIENCE_S)).check()
    same((await sandbox.exec("sleep 1000", timeout_s=0.1)).how, "timed_out", "how it ended")
    await still_at(sandbox, f"{place}/beats")


@on_shared
async def a_sandbox_can_be_used_after_a_deadline(bench: Bench, sandbox: Sandbox) -> None:
    same((await sandbox.exec("echo kept > kept; sleep 1000", timeout_s=0.4)).how, "timed_out", "how it ended")
    same(await output_of(sandbox, "cat kept"), "kept", "a file from before")


@on_shared
async def cancelling_ends_the_command(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    begun = asyncio.Event()
    command = f"while :; do echo x >> '{place}/beats'; echo x; sleep 0.02; done"
    running = asyncio.ensure_future(sandbox.exec(command, on_output=lambda stream, data: begun.set()))
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    true(running.cancelled(), "it was not cancelled")
    await still_at(sandbox, f"{place}/beats")


@on_shared
async def a_fault_of_the_reader_ends_the_command(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)

    def fail(stream: Stream, data: bytes) -> None:
        raise ZeroDivisionError

    command = f"while :; do echo x >> '{place}/beats'; echo x; sleep 0.02; done"
    try:
        await sandbox.exec(command, on_output=fail, timeout_s=PATIENCE_S)
    except ZeroDivisionError:
        await still_at(sandbox, f"{place}/beats")
    else:
        raise NotConformingError("what on_output raised was lost")


@on_shared
async def output_that_is_closed_is_no_end(bench: Bench, sandbox: Sandbox) -> None:
    same((await sandbox.exec("exec >&- 2>&-; sleep 0.2; exit 5", timeout_s=PATIENCE_S)).exit_code, 5, "exit code")


@case
async def a_fork_bomb_is_contained(bench: Bench) -> None:
    needs((await bench.capabilities()).limits["pids"] == "kernel", "the number of processes is not limited")
    async with await bench.make(limits=Limits(cpus=0.5, memory_mb=512, pids=48)) as sandbox:
        finished = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 1000", timeout_s=1.0)
        same(finished.how, "timed_out", "how it ended")
        same(await output_of(sandbox, "echo alive", timeout_s=PATIENCE_S), "alive", "a command afterwards")
