"""The executor of map over functions that misbehave, each in its way: what the row is told, and that the others go on."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rollout.model.errors import AttemptError
from rollout.model.item import DEFAULT_SPEC, ItemSpec, Key
from rollout.objects.digest import object_id
from rollout.objects.tree import describe
from rollout.workloads.map.failure import RowError, from_text
from rollout.workloads.map.limits import BACKSTOP_S
from rollout_worker.attempts import Held, Plan
from rollout_worker.causes import MESSAGE_MAX
from rollout_worker.executors import map as executor_map
from rollout_worker.executors import map_process
from rollout_worker.executors.map import OUTPUT_BURST, OUTPUT_PER_S, MapExecutor, Output, UserProcess
from rollout_worker.executors.port import Attempt, LostError, Run
from rollout_worker.placement import BUSY_S, Child, ChildState
from rollout_worker.processes.runner import failure_of

FUNCTIONS = """
import os, sys, time, ctypes, subprocess, socket

pairs = []

def double(row):
    return row * 2

async def later(row):
    import asyncio
    await asyncio.sleep(0)
    return ["later", row, id(asyncio.get_running_loop())]

class Counter:
    def __init__(self):
        self.pid, self.calls = os.getpid(), 0
    def __call__(self, row):
        self.calls += 1
        return [self.pid, self.calls]

class AsyncCounter(Counter):
    async def __call__(self, row):
        return super().__call__(row)

class Unmade:
    def __init__(self):
        raise ConnectionError("no licence server")

class Unsteady:
    def __init__(self):
        with open(__file__ + ".starts", "a") as file:
            file.write(".")
            if file.tell() in (2, 3):
                raise (ConnectionError, KeyError)[file.tell() - 2]("no licence just now")
            if file.tell() > 4:
                raise KeyError("never again")
    def __call__(self, row):
        return os._exit(4) if row == "exit" else row

class Final(Exception):
    retry = False

def act(row):
    do = row.get("do")
    if do == "raise":
        return inner(row)
    if do == "final":
        raise Final("for good")
    if do == "unprintable":
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError
        raise Odd
    if do == "hang":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if do == "fork":
        if os.fork() == 0:
            return "the fork's"
        return "the parent's"
    if do == "fork-lives":
        if os.fork() == 0:
            time.sleep(1000)
        return "the parent's"
    if do == "print":
        for _ in range(row["mib"]):
            sys.stdout.write("x" * (1 << 20))
        return "printed"
    if do == "segv":
        ctypes.string_at(0)
    if do == "sys.exit":
        sys.exit(3)
    if do == "_exit":
        print("farewell")
        os._exit(4)
    if do == "memory":
        raise MemoryError
    if do == "big":
        return len(row["data"])
    if do == "close":
        os.closerange(3, 100)
        pairs.extend(socket.socketpair() for _ in range(20))  # with the numbers of those that it closed
        return "never heard"
    if do == "garble":
        for fd in range(3, 100):
            try:
                os.write(fd, b"\\1\\0\\0\\0\\4" + bytes(16) + b"x" * 100)
            except OSError:
                pass
        return "never heard"
    if do == "patch":
        import json
        json.dumps = lambda *a, **k: "not json"
        json.loads = None
        json.JSONEncoder.encode = json.JSONEncoder.iterencode = lambda *a, **k: '"x"\\n{"row":1}'
        return row
    if do == "stuck in C":
        ctypes.PyDLL(None).sleep(1000)
    return {"ok": row["n"]} if "n" in row else eval(row["eval"])

def inner(row):
    raise ValueError("a bad row: " + row["why"])
"""


class FakeContext:
    def __init__(self, scratch: Path, objects: dict[bytes, bytes]) -> None:
        self.scratch = scratch
        self.objects = objects

    async def object_path(self, object_id: bytes) -> Path:
        name = object_id.hex()
        path = self.scratch / "cache" / name[:2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.objects[object_id])
        return path


class Calls:
    """Rows to a started executor."""

    def __init__(self, executor: MapExecutor, run: Run, context: FakeContext, timeout_s: float) -> None:
        self.executor = executor
        self._spec = ItemSpec(timeout_ms=round((timeout_s + BACKSTOP_S) * 1000) if timeout_s else 0)
        self._run = run
        self._context = context
        self._seq = 0

    def start(self, row: Any) -> asyncio.Task[Any]:
        self._seq += 1
        attempt = Attempt(Key(1, self._seq), 1, bytes(32), json.dumps(row).encode(), self._spec, self._run)
        return asyncio.create_task(self._call(attempt))

    async def _call(self, attempt: Attempt) -> Any:
        return json.loads((await self.executor.run(attempt, self._context)).data)  # type: ignore[arg-type]

    async def error(self, row: Any) -> tuple[RowError, bool]:
        """What it is told, and whether another try may help."""
        with pytest.raises(AttemptError) as caught:
            await self.start(row)
        return from_text(caught.value.error_code, caught.value.message), caught.value.retry


@asynccontextmanager
async def loaded(
    tmp_path: Path,
    function: str,
    *,
    code: str = FUNCTIONS,
    timeout_s: float = 0.0,
    at_once: int = 0,
    most: int = 0,
    **arguments: Any,
) -> AsyncIterator[Calls]:
    directory = tmp_path / "code"
    (directory / "package").mkdir(parents=True, exist_ok=True)
    (directory / "package" / "__init__.py").touch()
    (directory / "package" / "functions.py").write_text(code)
    tree = await describe(directory)
    objects = {object_id(data): data for data in (p.read_bytes() for p in directory.rglob("*.py"))}
    objects[tree.id] = tree.to_bytes()
    config: dict[str, Any] = {"function": f"package.functions:{function}", "code": {"manifest": tree.id.hex()}}
    config |= {"run": {"concurrency_per_process": at_once, "max_rows_per_process": most}, "arguments": arguments}
    run, context = Run("01J00000000000000000000000", "map", config), FakeContext(tmp_path, objects)
    executor = MapExecutor()
    await executor.start(run, context)  # type: ignore[arg-type]
    try:
        yield Calls(executor, run, context, timeout_s)
    finally:
        await executor.close()


def sleepers() -> list[psutil.Process]:
    """Programs that `act` has started."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]


@pytest.mark.parametrize("function", ["later", "Counter", "AsyncCounter", "double"])
async def test_functions_coroutines_and_classes(tmp_path: Path, function: str) -> None:
    async with loaded(tmp_path, function) as calls:
        found = await asyncio.gather(*[calls.start(row) for row in (1, 2, 3)])
    if function == "double":
        assert found == [2, 4, 6]
    elif function == "later":
        assert [row for _, row, _ in found] == [1, 2, 3] and len({loop for *_, loop in found}) == 1
    else:
        assert [n for _, n in found] == [1, 2, 3] and len({pid for pid, _ in found}) == 1


async def test_each_misbehaviour_costs_its_own_row_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with loaded(tmp_path, "act", timeout_s=1.0) as calls:
        error, retry = await calls.error({"do": "raise", "why": "negative"})
        assert (error.type, error.message, retry) == ("ValueError", "a bad row: negative", True)
        lines = error.traceback.splitlines()
        assert 'File "package/functions.py"' in lines[1] and "map_process" not in error.traceback
        assert sum("File" in line for line in lines) == 2

        error, retry = await calls.error({"do": "final"})
        assert error.type == "package.functions.Final" and not retry
        error, _ = await calls.error({"do": "unprintable"})
        assert "cannot be made" in error.message
        error, _ = await calls.error({"do": "memory"})
        assert error.code == "out_of_memory"
        error, _ = await calls.error({"do": "sys.exit"})
        assert error.type == "SystemExit" and "sys.exit(3)" in error.message

        before, after = calls.start({"n": 1}), None
        crash, after = calls.start({"do": "segv"}), calls.start({"n": 2})
        assert await before == {"ok": 1}
        with pytest.raises(AttemptError, match=r"ProcessDied.*SIGSEGV(.|\n)*functions.py") as caught:
            await crash
        assert caught.value.error_code == "process_died" and caught.value.retry
        assert "map_process" not in caught.value.message
        assert await after == {"ok": 2}
        error, _ = await calls.error({"do": "_exit"})
        assert "exit code 4" in error.message and "farewell" in error.message

        began = time.monotonic()
        hang, after = calls.start({"do": "hang"}), calls.start({"n": 3})
        with pytest.raises(AttemptError, match=r"still running after 1 s(.|\n)*functions.py.*in act") as caught:
            await hang
        assert caught.value.error_code == "timeout" and time.monotonic() - began < 10
        assert await after == {"ok": 3}
        assert "map_process" not in capfd.readouterr().out, "what is said of crashes and hangs is no output"
        assert not sleepers()
        error, _ = await calls.error({"do": "stuck in C"})
        assert error.code == "timeout" and "functions.py" in error.traceback

        for do in ("close", "garble"):
            error, _ = await calls.error({"do": do})
            assert error.code == "process_died" and "descriptors that it did not open" in error.message, do

        assert await calls.start({"do": "patch"}) == {"do": "patch"}
        assert await calls.start({"do": "fork"}) == "the parent's"
        assert await calls.start({"do": "fork-lives"}) == "the parent's"
        assert await calls.start({"n": 4}) == {"ok": 4}
        assert await calls.start({"do": "big", "data": "x" * 5_000_000}) == 5_000_000


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("{'a': [1, 2, 3, {b'x'}]}", r"a member of result\['a'\]\[3\] is a bytes, which is no JSON value: decode"),
        ("{'a': float('nan')}", r"result\['a'\] is nan"),
        ("[float('inf')]", r"result\[0\] is inf"),
        ("{'a': {1: 2}}", r"result\['a'\] has the key 1, which is an int"),
        ("object()", r"result is an object"),
        ("b'x'", r"result is a bytes.*decode it"),
        ("(x for x in [])", r"result is a generator"),
        ("(l := [], l.append(l))[0]", r"nested more than 200 levels deep, or contains itself"),
        ("'x' * (65 << 20)", r"65 MiB"),
        ("10 ** 5000", r"Exceeds the limit .4300 digits."),
    ],
)
async def test_what_is_no_json_is_told_with_its_place(tmp_path: Path, expression: str, message: str) -> None:
    async with loaded(tmp_path, "act") as calls:
        error, retry = await calls.error({"eval": expression})
        assert error.code == "not_json" and not retry
        assert re.search(message, error.message), error.message


API = "import os\nclass Api:\n    def __init__(self):\n        os.environ['API_URL_NOT_SET']\n"


@pytest.mark.parametrize(
    ("function", "code", "message", "retry"),
    [
        ("absent", FUNCTIONS, "(package/functions.py) has no 'absent'", False),
        ("sys", FUNCTIONS, "is a module, which cannot be called", False),
        ("f", "import no_such", "package.functions imports 'no_such', which is not on this worker: install it", False),
        ("f", "def f(:", "importing package.functions failed: SyntaxError", False),
        ("f", "raise SystemExit", "importing package.functions failed: SystemExit", False),
        ("Unmade", FUNCTIONS, "Unmade() failed: ConnectionError: no licence server", True),
        ("Api", API, "Api() failed: KeyError: 'API_URL_NOT_SET'", False),
        ("Api", API.replace("os.environ", "next_to"), "Api() failed: NameError", False),
        ("f", "import os\nprint('bye')\nos._exit(9)", "exit code 9; it printed last:\nbye", True),
    ],
)
async def test_why_it_cannot_be_loaded(tmp_path: Path, function: str, code: str, message: str, retry: bool) -> None:
    before = psutil.Process().children()
    with pytest.raises(AttemptError) as caught:
        async with loaded(tmp_path, function, code=code):
            pass
    error = caught.value
    assert error.message.startswith(f"package.functions:{function} cannot be loaded: ") and message in error.message
    assert (error.error_code, error.retry) == ("load_failed", retry)
    assert psutil.Process().children() == before


async def test_where_it_cannot_be_loaded_is_told_within_what_a_cause_may_have(tmp_path: Path) -> None:
    code = f"import json\ndef deep(n):\n    return deep(n - 1) + deep(n) if n else {'no' + 'x' * 3000}\ndeep(30)\n"
    with pytest.raises(AttemptError) as caught:
        async with loaded(tmp_path, "deep", code=code):
            pass
    said = caught.value.message
    assert len(said) <= MESSAGE_MAX and '\n  File "package/functions.py", line 4, in <module>\n' in said
    assert "Traceback" not in said and said.count("NameError") == 1


async def test_a_class_that_could_be_made_before_is_tried_again_at_no_rows_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_map, "RESTART_PAUSE_S", 0.01)
    async with loaded(tmp_path, "Unsteady") as calls:
        crash, after = calls.start("exit"), calls.start("after")
        with pytest.raises(AttemptError, match="exit code 4"):
            await crash
        assert await after == "after"
        crash, after = calls.start("exit"), calls.error("after")
        with pytest.raises(AttemptError, match="exit code 4"):
            await crash
        error, retry = await after
        assert "Unsteady() failed: KeyError: 'never again'" in error.message and retry, "it costs a try, no more"


async def test_output_is_passed_on_within_a_budget(tmp_path: Path) -> None:
    began = time.monotonic()
    with (tmp_path / "said").open("w+b") as file:
        output = Output(file.fileno())
        output.take("stdout", b"begun, ")
        for _ in range(1 << 10):
            output.take("stdout", (b"x" * 1023 + b"\n") * 1023 + b"y" * 1024)  # a gigabyte; each last line goes on
        output.take("stdout", b"the end\nwhole\nthe end")
        output.close()
        file.seek(0)
        first, *said = file.read().splitlines(keepends=True)
    shown = [line for line in said if line[:1] != b"\x1e"]
    notes = [tuple(map(int, line[2:].split(b"."))) for line in said if line[:2] == b"\x1e!"]
    assert first == b"\x1e\n" and shown[0] == b"begun, " + b"x" * 1023 + b"\n"
    left_out = [sum(note[i] for note in notes) for i in range(3)]
    assert left_out[0] == 0 and len(shown) + left_out[1] == (1 << 10) * 1023 + 3, "what goes on is one line"
    assert sum(map(len, shown)) + left_out[2] == (1 << 30) + len("begun, the end\nwhole\nthe end")
    assert sum(map(len, shown)) <= OUTPUT_BURST + OUTPUT_PER_S * (time.monotonic() - began) + 1024
    assert output.text().endswith("the end") and len(output.last_words) <= 4096


async def test_a_gigabyte_of_output_costs_its_row_nothing_but_time(tmp_path: Path) -> None:
    async with loaded(tmp_path, "act") as calls:
        assert await calls.start({"do": "print", "mib": 256}) == "printed"


async def test_what_is_not_begun_can_be_taken_back_and_is_never_run(tmp_path: Path) -> None:
    code = (
        "import time, os\ndef f(row):\n    open(row['log'], 'a').write(str(row['n']) + ' ')\n    time.sleep(row['s'])\n"
    )
    log = str(tmp_path / "log")
    async with loaded(tmp_path, "f", code=code) as calls:
        for n in range(30):
            await calls.start({"n": n, "s": 0, "log": log})  # now it is taken for fast, and given many at once
        tasks = [calls.start({"n": n, "s": 0.3 if n == 100 else 0, "log": log}) for n in range(100, 110)]
        while "100" not in Path(log).read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # another process does it
        keys = [Key(1, seq) for seq in range(31, 37)]
        back = calls.executor.take_back(keys)
        assert back == keys[1:]
        await tasks[-1]  # results that come before they are cancelled send none of them again
        for task in tasks[1:6]:
            task.cancel()
        await asyncio.wait(tasks)
        assert [t.cancelled() for t in tasks] == [False] + [True] * 5 + [False] * 4
    assert Path(log).read_text().split()[30:] == ["100", "106", "107", "108", "109"]


async def test_a_row_that_is_read_while_those_before_it_are_taken_back_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends read the queue, so the process may get a row from behind those that were taken back."""
    real = UserProcess.take_back

    def but_the_last(process: Any) -> set[int]:
        found = real(process)
        last = max(found)
        process._rows.send(map_process.ROW.pack(map_process.INLINE, last) + b"7")
        return found - {last}

    monkeypatch.setattr(UserProcess, "take_back", but_the_last)
    async with loaded(tmp_path, "double") as calls:
        assert await asyncio.gather(*[calls.start(n) for n in range(30)]) == [2 * n for n in range(30)]  # fast, by now
        [process] = [p for p in psutil.Process().children() if map_process.__file__ in p.cmdline()]
        process.suspend()
        rows = [calls.start(n) for n in range(8)]
        await asyncio.sleep(0)
        assert len(calls.executor.take_back([Key(1, 30 + seq) for seq in range(1, 8)])) == 7
        process.resume()
        for row in rows[:7]:
            row.cancel()
        assert await asyncio.wait_for(rows[7], 30) == 14


async def test_a_row_that_is_cancelled_while_it_runs_has_ended_with_it(tmp_path: Path) -> None:
    async with loaded(tmp_path, "act") as calls:
        task, after = calls.start({"do": "hang"}), calls.start({"n": 1})
        while not sleepers():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # another process does it
        task.cancel()
        await asyncio.wait([task])
        assert not sleepers()
        assert await after == {"ok": 1}


async def test_the_next_row_pays_nothing_for_one_that_was_cancelled_too_late(tmp_path: Path) -> None:
    code = "import time\ndef f(row):\n    time.sleep(row)\n    return row\n"
    async with loaded(tmp_path, "f", code=code) as calls:
        for _ in range(30):
            await calls.start(0)  # now it is taken for fast, and given many at once
        task, after = calls.start(0.2), calls.start(0.6)
        await asyncio.sleep(0.05)
        time.sleep(0.4)  # noqa: ASYNC251 - its result is there, and not read
        task.cancel()
        assert await after == 0.6 and task.cancelled()


def test_a_slot_that_tells_of_results_while_it_has_more_is_given_what_lasts_a_while() -> None:
    run = Run("01J00000000000000000000000", "map", {})
    child = Child(1, Plan(run, "slot", "key"))
    child.state = ChildState.UP
    now = 100.0
    child.moved_at = child.delivered_at = now
    held = Held(1, 1, 1, bytes(32), b"", DEFAULT_SPEC, child.plan)
    child.in_hand[1, 1] = held
    for _ in range(20):  # 5 rows of a millisecond each time
        now += 0.005
        child.settle(now, 5)
    assert BUSY_S / 2 <= child.depth * 0.001 <= 2 * BUSY_S
    for _ in range(10):  # then one of a second each time
        now += 1.0
        child.settle(now, 1)
    assert child.depth == child.base


WITH_ARGUMENTS = """
class Made:
    def __init__(self, name, n=1):
        self.all = [name, n]
    def __call__(self, row):
        return [row, *self.all]

def plain(first, row, last, *, n):
    return [first, row, last, n]

async def later(row, n):
    return [row, n]
"""


@pytest.mark.parametrize(
    ("function", "arguments", "result"),
    [
        ("Made", {"args": ["a"], "kwargs": {"n": 2}}, [7, "a", 2]),
        ("plain", {"before": [1], "args": [2], "kwargs": {"n": 3}}, [1, 7, 2, 3]),
        ("later", {"kwargs": {"n": 3}}, [7, 3]),
    ],
)
async def test_arguments_beside_the_row(
    tmp_path: Path, function: str, arguments: dict[str, Any], result: list[Any]
) -> None:
    async with loaded(tmp_path, function, code=WITH_ARGUMENTS, **arguments) as calls:
        assert await calls.start(7) == result
        assert calls.executor.concurrency == (32 if function == "later" else 1)


@pytest.mark.parametrize("function", ["Counter", "AsyncCounter"])
async def test_a_process_is_ended_after_so_many_rows(tmp_path: Path, function: str) -> None:
    async with loaded(tmp_path, function, most=3, at_once=2 if function == "AsyncCounter" else 0) as calls:
        found = await asyncio.gather(*[calls.start(row) for row in range(8)])
    assert [n for _, n in found] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert len({pid for pid, _ in found}) == 3


ASYNC = """
import asyncio, os, sys, time

begun = 0

async def act(row):
    global begun
    begun += 1
    do = row.get("do")
    if do == "meet":  # only together
        while begun < row["n"]:
            await asyncio.sleep(0.001)
    if do == "hang":
        await deeper()
    if do == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if do == "hold":
        await asyncio.gather(asyncio.create_task(hold()))
    if do == "exit":
        while begun < row["n"]:
            await asyncio.sleep(0.001)
        await asyncio.gather(asyncio.create_task(leave()))
    if do == "killed":
        await asyncio.to_thread(lambda: (time.sleep(0.2), os._exit(4)))
    if do == "print":
        line = f"row {row['n']}" + chr(10)  # in one piece: two threads print at once
        sys.stdout.write(line)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(sys.stdout.write, line)
    if do == "raise":
        raise ValueError("bad")
    return row.get("n")

async def deeper():
    await asyncio.sleep(1000)

async def hold():
    time.sleep(1000)

async def leave():
    os._exit(4)
"""


async def test_rows_of_an_async_function_run_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with loaded(tmp_path, "act", code=ASYNC, timeout_s=30, at_once=8) as calls:
        assert calls.executor.concurrency == 8
        assert await asyncio.gather(*[calls.start({"do": "meet", "n": 8}) for _ in range(8)]) == [8] * 8
        assert await asyncio.gather(*[calls.start({"n": n}) for n in range(100)]) == list(range(100))
        error, _ = await calls.error({"do": "raise"})
        assert error.traceback.count("File") == 1 and 'File "package/functions.py"' in error.traceback
        await asyncio.gather(*[calls.start({"do": "print", "n": n}) for n in (1, 2)])
        printed = ""
        while printed.count("row") < 4:
            printed += capfd.readouterr().out
            await asyncio.sleep(0.01)  # it comes by another way than the results
    said, row = [], ""
    for line in printed.splitlines():
        row = line[1:] if line.startswith("\x1e") else row
        said += [(row, line)] if line.startswith("row") else []
    assert len(said) == 4 and len(set(said)) == 2, "each line is of its own row, also from a thread"


async def test_a_row_beside_others_is_cancelled_alone(tmp_path: Path) -> None:
    async with loaded(tmp_path, "act", code=ASYNC, timeout_s=1.0, at_once=3) as calls:
        hang, other = calls.start({"do": "hang"}), calls.start({"do": "meet", "n": 4})
        dropped = calls.start({"do": "hang"})
        await asyncio.sleep(0.1)
        dropped.cancel()
        await asyncio.wait([dropped])
        assert dropped.cancelled()
        assert await calls.start({"n": 1}) == 1 and await other == 4, "the process is the same"
        with pytest.raises(AttemptError, match=r"still running after 1 s(.|\n)*in deeper") as caught:
            await hang
        assert caught.value.error_code == "timeout"


@pytest.mark.parametrize("do", ["hold", "stubborn"])
async def test_a_row_that_does_not_let_go_ends_with_its_process(
    tmp_path: Path, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_map, "DUMP_WAIT_S", 0.3)
    monkeypatch.setattr(executor_map, "HELD_S", 0.3)
    async with loaded(tmp_path, "act", code=ASYNC, timeout_s=1.0, at_once=3) as calls:
        beside = calls.start({"do": "meet", "n": 99})
        error, _ = await calls.error({"do": do})
        assert error.code == "timeout" and (do == "stubborn" or "in hold" in error.traceback)
        with pytest.raises(AttemptError):
            await beside
        assert await calls.start({"n": 1}) == 1


async def test_a_crash_costs_the_row_a_try_and_is_a_loss_for_those_beside_it(tmp_path: Path) -> None:
    async with loaded(tmp_path, "act", code=ASYNC, at_once=3) as calls:
        rows: list[dict[str, Any]] = [{"do": "meet", "n": 99}, {"do": "exit", "n": 3}, {"do": "meet", "n": 98}]
        tasks = [calls.start(row) for row in [*rows, {"n": 1}]]
        await asyncio.wait(tasks)
        crash = tasks[1].exception()
        assert isinstance(crash, AttemptError) and crash.error_code == "process_died"
        assert [isinstance(task.exception(), LostError) for task in tasks[:3]] == [True, False, True]
        lost = tasks[0].exception()
        assert isinstance(lost, LostError) and failure_of(lost).worker_lost and not failure_of(crash).worker_lost
        assert tasks[3].result() == 1, "it had not begun"
        tasks = [calls.start({"do": "killed"}), calls.start({"do": "hang"})]
        await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), LostError) for task in tasks), "nobody knows which it was"


async def test_only_an_async_function_can_be_asked_to_run_rows_together(tmp_path: Path) -> None:
    async with loaded(tmp_path, "AsyncCounter") as calls:
        assert calls.executor.concurrency > 1
    with pytest.raises(AttemptError, match="no `async def` function"):
        async with loaded(tmp_path, "double", at_once=2):
            pass
