"""Cases on the output, the ending and the environment of commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from rollout_worker.sandboxes.conformance.suite import (
    PATIENCE_S,
    Bench,
    case,
    eventually,
    on_shared,
    output_of,
    raises,
    same,
    true,
)
from rollout_worker.sandboxes.errors import (
    CommandFailedError,
)
from rollout_worker.sandboxes.port import (
    MIB,
    Sandbox,
    Stream,
)


@on_shared
async def exit_code_zero(bench: Bench, sandbox: Sandbox) -> None:
    finished = await sandbox.exec("echo hello")
    same((finished.how, finished.exit_code, finished.signal, finished.ok), ("exited", 0, None, True), "how it ended")
    same(finished.stdout.text(), "hello\n", "stdout")


@on_shared
async def exit_code_is_kept(bench: Bench, sandbox: Sandbox) -> None:
    finished = await sandbox.exec("exit 37")
    same((finished.how, finished.exit_code, finished.ok), ("exited", 37, False), "how it ended")
    async with raises(CommandFailedError):
        finished.check()


@on_shared
async def stdout_and_stderr_are_apart(bench: Bench, sandbox: Sandbox) -> None:
    finished = await sandbox.exec("echo out; echo err >&2; echo out2")
    same((finished.stdout.text(), finished.stderr.text()), ("out\nout2\n", "err\n"), "the streams")


@on_shared
async def a_signal_is_no_exit_code(bench: Bench, sandbox: Sandbox) -> None:
    finished = await sandbox.exec("kill -SEGV $$")
    same((finished.how, finished.exit_code, finished.signal), ("signalled", None, 11), "how it ended")


@on_shared
async def arguments_are_no_shell(bench: Bench, sandbox: Sandbox) -> None:
    finished = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "*", "'\"", ""])
    same(finished.check().stdout.text(), "a b|$HOME|*|'\"||", "stdout")


@on_shared
async def no_such_program(bench: Bench, sandbox: Sandbox) -> None:
    same((await sandbox.exec(["no-such-program-here"])).exit_code, 127, "exit code")
    same((await sandbox.exec("no-such-program-here")).exit_code, 127, "exit code in a shell")


@on_shared
async def not_executable(bench: Bench, sandbox: Sandbox) -> None:
    await sandbox.write_file(f"{sandbox.home}/no-program", b"x", mode=0o644)
    same((await sandbox.exec([f"{sandbox.home}/no-program"])).exit_code, 126, "exit code")


@on_shared
async def stdin_of_bytes(bench: Bench, sandbox: Sandbox) -> None:
    same((await sandbox.exec(["cat"], stdin=b"\x00one\ntwo")).check().stdout.head, b"\x00one\ntwo", "stdout")


@on_shared
async def stdin_as_it_comes(bench: Bench, sandbox: Sandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(30):
            yield bytes([number]) * 100_000

    finished = (await sandbox.exec("wc -c", stdin=pieces())).check()
    same(finished.stdout.text().strip(), "3000000", "bytes that arrived")


@on_shared
async def no_stdin_is_empty(bench: Bench, sandbox: Sandbox) -> None:
    same((await sandbox.exec(["cat"], timeout_s=PATIENCE_S)).how, "exited", "how it ended")


@on_shared
async def stdin_that_nobody_reads(bench: Bench, sandbox: Sandbox) -> None:
    same((await sandbox.exec("exit 3", stdin=bytes(4 * MIB), timeout_s=PATIENCE_S)).exit_code, 3, "exit code")


@case
async def environment_is_what_was_given(bench: Bench) -> None:
    os.environ["CONFORMANCE_SECRET"] = "not for sandboxes"
    try:
        async with await bench.make(env={"GIVEN": "spec", "OTHER": "spec"}) as sandbox:
            found = await output_of(sandbox, "env", env={"OTHER": "exec", "SPACED": "a b\tc"})
    finally:
        del os.environ["CONFORMANCE_SECRET"]
    lines = found.splitlines()
    true({"GIVEN=spec", "OTHER=exec", "SPACED=a b\tc"} <= set(lines), f"variables are missing: {lines}")
    true("not for sandboxes" not in found, "a variable of the worker is in the sandbox")


@case
async def working_directory(bench: Bench) -> None:
    async with await bench.make() as sandbox:
        same(await output_of(sandbox, "pwd"), sandbox.home, "the default")
        same(await output_of(sandbox, "pwd", cwd="/usr"), "/usr", "cwd")
        await sandbox.write_file("inner/file", b"")
        same(await output_of(sandbox, "pwd", cwd="inner"), f"{sandbox.home}/inner", "a relative cwd")
        same((await sandbox.exec("true", cwd="/no/such/place")).exit_code, 126, "exit code without that directory")
    async with await bench.make(workdir="/usr/lib") as sandbox:
        same(await output_of(sandbox, "pwd"), "/usr/lib", "workdir of the spec")


@on_shared
async def home_is_writable(bench: Bench, sandbox: Sandbox) -> None:
    same(await output_of(sandbox, 'cd && echo x > "$HOME/mine" && cat mine && echo "$HOME"'), f"x\n{sandbox.home}", "")


@on_shared
async def output_comes_while_it_runs(bench: Bench, sandbox: Sandbox) -> None:
    place = await bench.inside(sandbox)
    seen: list[tuple[Stream, bytes]] = []

    async def answer(stream: Stream, data: bytes) -> None:
        seen.append((stream, data))
        if b"ready" in data:
            await sandbox.write_file(f"{place}/go", b"")

    command = f"echo ready; while [ ! -e '{place}/go' ]; do sleep 0.02; done; echo done >&2"
    finished = await sandbox.exec(command, on_output=answer, timeout_s=PATIENCE_S)
    same(finished.how, "exited", "how it ended")
    same(seen, [("stdout", b"ready\n"), ("stderr", b"done\n")], "what came")


@on_shared
async def every_byte_arrives(bench: Bench, sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 400
    await sandbox.write_file(f"{sandbox.home}/bytes", data)
    output = (await sandbox.exec("cat bytes")).check().stdout
    same(output.head + output.tail, data, "stdout")


@on_shared
async def large_output_goes_to_a_file(bench: Bench, sandbox: Sandbox) -> None:
    size = bench.large
    place = bench.directory()
    command = f"echo first; head -c {size} /dev/zero; echo last"
    finished = (await sandbox.exec(command, keep_bytes=1000, output_dir=place, timeout_s=2 * PATIENCE_S)).check()
    output = finished.stdout
    same(output.size, size + 11, "bytes printed")
    same((len(output.head), len(output.tail)), (1000, 1000), "bytes kept")
    true(output.head.startswith(b"first\n\0") and output.tail.endswith(b"\0last\n"), "head and tail")
    true(output.file is not None and output.file.parent == place, "there is no file where it was to be")
    if output.file is not None:
        same((output.file.stat().st_size, output.in_file), (size + 11, size + 11), "bytes in the file")
        output.file.unlink()
    same(output.missing, size + 11 - 2000, "bytes between")


@on_shared
async def a_process_left_behind_does_not_hold_the_command(bench: Bench, sandbox: Sandbox) -> None:
    if not sandbox.capabilities.left_behind:
        finished = await sandbox.exec("sleep 1000 & echo started", timeout_s=PATIENCE_S)
        same((finished.how, finished.stdout.text()), ("exited", "started\n"), "how it ended, and what was printed")
        return
    place = await bench.inside(sandbox)
    loop = f"while :; do echo tick; echo x >> '{place}/beats'; sleep 0.02; done"
    finished = await sandbox.exec(f"({loop}) & echo started", timeout_s=PATIENCE_S)
    same(finished.how, "exited", "how it ended")
    true(finished.stdout.text().startswith("started") or "tick" in finished.stdout.text(), "what was printed")

    async def beats() -> int:
        return int(await output_of(sandbox, f"cat {place}/beats 2> /dev/null | wc -l"))

    before = await beats()

    async def goes_on() -> bool:
        return await beats() > before + 10

    await eventually(goes_on, "what was left behind goes on, and can print")
    await sandbox.kill()


@on_shared
async def commands_side_by_side(bench: Bench, sandbox: Sandbox) -> None:
    found = await asyncio.gather(*(sandbox.exec(f"echo {n}; cat; exit {n}", stdin=b"%d" % n) for n in range(12)))
    same([f.stdout.text() for f in found], [f"{n}\n{n}" for n in range(12)], "their outputs")
    same([f.exit_code for f in found], list(range(12)), "their exit codes")
