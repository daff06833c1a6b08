"""The workload `script`: each item says in JSON how it behaves. For tests, demos and benchmarks of the engine itself.

Keys of a payload, all optional: `sleep_ms`, `busy_ms` (holds the interpreter), `alloc_mib`, `fail_times` (attempts
numbered up to this fail), `fail_code`, `fatal` (no retry), `fail_data` (text that a failed attempt leaves behind; a
number: so many bytes), `fail_keep` (text of an object that it names), `fail_units` (as many in, and twice as many out),
`retry_after_ms`, `failures` (fails until so many attempts have failed before), `crash` (the process kills itself; a
number: only attempts up to it), `segv`, `exit`, `hang` (ignores cancellation), `spawn` (payloads of children, whose
results are listed; with `child_labels` and `child_lane`), `chain_append` (the predecessor's result and `data`), `size`
(bytes of result), `print`, `print_mib` (so much output), `put` (bytes stored as an object, whose id is the result),
`echo`, `data`, `plugin` with `method` and `payload` (the result is its answer as JSON), `environ` (names of variables:
the result is the hash of each value, null where it is not set), `leak` (a variable whose value is printed and quoted in
a failure). `until`: goes on once that file exists. `effects`: appends a line when it starts, ends and is cancelled to
that file, as something outside that cannot be taken back; `alone`: locks that file while it runs, and where another
process holds the lock, adds a line `beside` to the effects and fails. The kernel lets go of the lock of a process that
is killed, once it has ended. `crash_after`: like `crash`, but after the children were spawned and before anything is
returned. A payload that begins with b"noop" returns at once. `start_needs` (a file), `start_error`, `start_print` and
`start_crash` of the run's configuration say how a start ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from blake3 import blake3
from rollout.files import try_lock
from rollout.model.errors import AttemptError
from rollout.model.item import ItemSpec, NewItem, Outcome

from rollout_worker.executors.port import Attempt, Context, Done, Run

NOOP = b"noop"


def check_needs(name: str | None) -> None:
    """Check for a file that must be in the worker's directory."""
    if name and not Path(name).exists():
        raise AttemptError(f"there is no {name} in {Path.cwd().name}", code="start_error", retry=False)


class ScriptExecutor:
    placement: ClassVar[Literal["engine", "shared", "slot"]] = "slot"
    concurrency = 1

    @classmethod
    def engine_key(cls, run: Run) -> str:
        return "script"

    @classmethod
    def environment(cls, run: Run) -> dict[str, str]:
        environment = run.config.get("environment", {})
        return {str(k): str(v) for k, v in environment.items()}

    async def start(self, run: Run, context: Context) -> None:
        fault = run.config.get("start_error")
        if fault:
            raise AttemptError(str(fault), code="start_error", retry=False)
        await asyncio.to_thread(check_needs, run.config.get("start_needs"))
        if said := run.config.get("start_print"):
            print(said, flush=True)  # noqa: T201
        if run.config.get("start_crash"):
            os.kill(os.getpid(), signal.SIGKILL)

    def run_many(self, attempts: list[Attempt]) -> list[Done | None]:
        return [Done(b"") if a.payload.startswith(NOOP) else None for a in attempts]

    async def run(self, attempt: Attempt, context: Context) -> Done:
        if attempt.payload.startswith(NOOP):
            return Done(b"")
        try:
            script = json.loads(attempt.payload or b"{}")
        except ValueError as error:
            raise AttemptError(f"the script is not JSON: {error}", code="bad_script", retry=False) from error
        if not isinstance(script, dict):
            raise AttemptError("the script is no JSON object", code="bad_script", retry=False)
        script = cast(dict[str, Any], script)
        with alone(script, attempt):
            effect(script, attempt, "start")
            try:
                done = await self._run(script, attempt, context)
            except asyncio.CancelledError:
                effect(script, attempt, "cancelled")
                raise
            effect(script, attempt, "end")
        return done

    async def _run(self, script: dict[str, Any], attempt: Attempt, context: Context) -> Done:
        if script.get("print"):
            os.write(1, f"{script['print']}\n".encode())
        for _ in range(int(script.get("print_mib", 0))):
            os.write(1, b"one of very many lines, as a loop that was left in prints them.\n" * (1 << 14))
        if script.get("progress"):
            context.progress(str(script["progress"]))
        await self._misbehave(script, attempt)
        if script.get("sleep_ms"):
            await asyncio.sleep(script["sleep_ms"] / 1000)
        while not there(script.get("until")):  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(0.02)
        fails = attempt.attempt <= int(script.get("fail_times", 0)) or attempt.failures < int(script.get("failures", 0))
        if fails or script.get("fatal"):
            raise await self._failure(script, attempt, context)
        if "spawn" in script:
            return await self._family(script, attempt, context)
        if "put" in script:
            return Done((await context.put_object(os.urandom(0) + b"x" * int(script["put"]))).hex().encode())
        if "get" in script:
            return Done((await context.object_path(bytes.fromhex(script["get"]))).read_bytes())
        if "environ" in script:
            values = {str(name): os.environ.get(str(name)) for name in script["environ"]}
            hashes = {name: value and blake3(value.encode()).hexdigest() for name, value in values.items()}
            return Done(json.dumps(hashes, sort_keys=True).encode())
        if "leak" in script:
            value = os.environ[script["leak"]]
            os.write(1, f"the secret is {value}\n".encode())
            raise AttemptError(f"the secret is {value}", code="leak", retry=False)
        if "plugin" in script:
            limit = float(script.get("timeout_s", 30.0))
            answer = await context.call_plugin(script["plugin"], script["method"], script.get("payload", {}), limit)
            if isinstance(answer, bytes):
                answer = {"b64": base64.b64encode(answer).decode()}
            return Done(json.dumps(answer, sort_keys=True).encode())
        if script.get("chain_append"):
            return Done((attempt.predecessor or b"") + str(script.get("data", "")).encode())
        if "size" in script:
            return Done((attempt.id * (int(script["size"]) // 32 + 1))[: int(script["size"])])
        if script.get("echo"):
            return Done(attempt.payload)
        outcome = Outcome.SKIPPED if script.get("skip") else Outcome.DONE
        return Done(str(script.get("data", "")).encode(), units_in=1, units_out=1, outcome=outcome)

    async def _failure(self, script: dict[str, Any], attempt: Attempt, context: Context) -> AttemptError:
        left, units = script.get("fail_data", ""), int(script.get("fail_units", 0))
        keeps: list[bytes] = []
        if script.get("fail_keep"):
            keeps.append(await context.put_object(f"{script['fail_keep']} {attempt.failures}".encode()))
        return AttemptError(
            f"attempt {attempt.attempt} fails as told",
            code=str(script.get("fail_code", "scripted")),
            retry=not script.get("fatal"),
            data=b"x" * left if isinstance(left, int) else str(left).encode(),
            keeps=tuple(keeps),
            units_in=units,
            units_out=2 * units,
            retry_after_ms=script.get("retry_after_ms"),
        )

    async def _misbehave(self, script: dict[str, Any], attempt: Attempt) -> None:
        crash = script.get("crash", False)
        if crash and (crash is True or attempt.attempt <= int(crash)):
            os.kill(os.getpid(), signal.SIGKILL)
        if script.get("segv"):
            ctypes.string_at(0)
        if "exit" in script:
            os._exit(int(script["exit"]))
        if script.get("busy_ms"):
            # One C call that never lets go of the interpreter, so that no other thread of this process runs.
            ctypes.PyDLL(None).usleep(int(script["busy_ms"]) * 1000)
        if script.get("alloc_mib"):
            memory = bytearray(int(script["alloc_mib"]) << 20)
            memory[::4096] = b"x" * len(memory[::4096])
        while script.get("hang"):
            time.sleep(0.1)  # noqa: ASYNC251 - an executor that blocks its loop is what this is for

    async def _family(self, script: dict[str, Any], attempt: Attempt, context: Context) -> Done:
        items: list[NewItem] = []
        labels = tuple(sorted(script.get("child_labels", {}).items()))
        spec = ItemSpec(lane=str(script.get("child_lane", "")), require_labels=labels, retry_backoff_ms=100)
        for ordinal, payload in enumerate(script["spawn"]):
            body = json.dumps(payload).encode() if not isinstance(payload, str) else payload.encode()
            place = attempt.id + ordinal.to_bytes(8, "big")
            items.append(NewItem(blake3(b"\x01" + place + body).digest(), body, spec))
        await context.spawn(items)
        if attempt.attempt <= int(script.get("crash_after", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        found: list[Any] = []
        async for child in context.children():
            found.append(child.data.decode() if child.failure is None else {"error": child.failure.code})
        return Done(json.dumps(found, separators=(",", ":")).encode())


def there(path: str | None) -> bool:
    return path is None or Path(path).exists()


@contextlib.contextmanager
def alone(script: dict[str, Any], attempt: Attempt) -> Generator[None]:
    """Hold the lock of `alone`, if the script names one. Raises AttemptError, and adds a line, if another process holds
    it."""
    path = script.get("alone")
    if not path:
        yield
        return
    with Path(path).open("ab") as file:
        if not try_lock(file):
            effect(script, attempt, "beside")
            raise AttemptError(f"another process holds {path}", code="not_alone")
        yield


def effect(script: dict[str, Any], attempt: Attempt, what: str) -> None:
    """Append one line, `what` item attempt nanoseconds. O_APPEND keeps lines of several processes apart."""
    path = script.get("effects")
    if path:
        line = f"{what} {script.get('data', attempt.key.seq)} {attempt.attempt} {time.monotonic_ns()}\n"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
