"""Cases on limits for all processes of a sandbox together."""

from __future__ import annotations

from rollout_worker.sandboxes.conformance.suite import (
    PATIENCE_S,
    Bench,
    case,
    needs,
    output_of,
    same,
    true,
)
from rollout_worker.sandboxes.port import (
    Limits,
)


@case
async def memory_is_limited(bench: Bench) -> None:
    needs((await bench.capabilities()).limits["memory"] == "kernel", "memory is not limited for the sandbox as a whole")
    async with await bench.make(limits=Limits(cpus=0.5, memory_mb=48)) as sandbox:
        finished = await sandbox.exec("head -c 300000000 /dev/zero | tail", timeout_s=PATIENCE_S)
        same((finished.ok, finished.limit), (False, "memory"), "how it ended")
        same(await output_of(sandbox, "echo alive"), "alive", "a command afterwards")


@case
async def processors_are_limited(bench: Bench) -> None:
    needs((await bench.capabilities()).limits["cpus"] == "kernel", "processors are not limited")
    async with await bench.make(limits=Limits(cpus=0.1, memory_mb=256)) as sandbox:
        busy = "(timeout 0.8 sh -c 'while :; do :; done' & timeout 0.8 sh -c 'while :; do :; done'; wait); times"
        words = (await sandbox.exec(busy, timeout_s=PATIENCE_S)).check().stdout.text().split()
        used = sum(float(m) * 60 + float(s) for m, s in (w.rstrip("s").split("m") for w in words[2:4]))
        true(used < 0.5, f"{used:.2f} s of processor time in 0.8 s, with 0.1 processors")


@case
async def storage_is_limited(bench: Bench) -> None:
    needs((await bench.capabilities()).limits["storage"] != "no", "storage is not limited")
    async with await bench.make(limits=Limits(cpus=0.5, memory_mb=512, storage_mb=24)) as sandbox:
        finished = await sandbox.exec("head -c 60000000 /dev/zero > large", timeout_s=PATIENCE_S)
        same(finished.ok, False, "whether a file beyond the limit was written")
        await sandbox.exec("rm -f large")
        many = "n=0; while :; do head -c 4000000 /dev/zero > f$n || exit 1; n=$((n+1)); sleep 0.05; done"
        finished = await sandbox.exec(many, timeout_s=PATIENCE_S)
        true(finished.how != "timed_out" and not finished.ok, f"a disk filler {finished.how}")
        same(finished.limit, "storage", "the limit that ended it")


@case
async def files_that_were_removed_count_while_they_are_open(bench: Bench) -> None:
    found = await bench.capabilities()
    needs(found.limits["storage"] != "no" and bench.counts_unlinked, "files without a name are not counted")
    async with await bench.make(limits=Limits(cpus=0.5, memory_mb=512, storage_mb=24)) as sandbox:
        needs((await sandbox.exec("command -v bash")).ok, "there is no bash to open them with")
        descriptors = 'n=10; while [ $n -lt 200 ]; do eval "exec $n> f"; rm f; head -c 4000000 /dev/zero >&$n'
        finished = await sandbox.exec(
            ["bash", "-c", f"{descriptors}; n=$((n+1)); sleep 0.1; done"], timeout_s=PATIENCE_S
        )
        same((finished.ok, finished.limit), (False, "storage"), "how it ended")
        same(await output_of(sandbox, "echo alive"), "alive", "a command afterwards")


@case
async def processes_are_limited(bench: Bench) -> None:
    needs((await bench.capabilities()).limits["pids"] == "kernel", "the number of processes is not limited")
    async with await bench.make(limits=Limits(cpus=0.5, memory_mb=512, pids=24)) as sandbox:
        script = "for n in $(seq 60); do sleep 1000 & done; echo started"
        finished = await sandbox.exec(script, timeout_s=3.0)
        running = await sandbox.exec("true", timeout_s=PATIENCE_S)
        true("started" not in finished.stdout.text() or not finished.ok, "60 processes were started where 24 may be")
        same(running.ok, True, "a command afterwards")
