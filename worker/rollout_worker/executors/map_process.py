"""Process that runs a user's function row by row: `map_process.py ROWS_FD RESULTS_FD DUMP_FD PARENT`.

It runs several rows of an `async def` function concurrently (map_loop.py). It takes no part in the protocol between
worker and coordinator: whatever the function does here (crash, hang, exit, fork, print) costs the row that does it, and
the executor that started this process (executors/map.py) reports it.

Rows come as datagrams, one each, which the executor can take back while they are unread. Results are sent as frames:
number of the row, seconds, body. The module imports next to nothing, because it starts again after every crash.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from json import dumps, loads  # by name: the function may put others into the module
from types import TracebackType
from typing import Any, NoReturn

from rollout.processes.framing import send
from rollout.processes.interpreter import import_from
from rollout.processes.lifeline import die_with_parent
from rollout.workloads.map.converted import encode_result
from rollout.workloads.values import a_type, type_name

LOADED, LOAD_FAILED, RESULT, FAILED, CANCELLED = 1, 2, 3, 4, 5
"""Kinds of frames to the executor, which in turn sends map_loop.CANCEL."""
AT_ONCE = 32
"""Default number of concurrent rows of an `async def` function in a process."""
INLINE, FILE = b"R", b"F"
ROW = struct.Struct("<cQ")
NUMBER = struct.Struct("<Qd")

MARK = b"\x1e"
"""Start of a line of its own in the output, `MARK number`: the following output belongs to that row, or without a
number to none."""
UNHEARD_S = 5.0
_CO_COROUTINE = 0x80
"""Flag of `inspect`, whose import would cost every process ten milliseconds."""
TEXT_MAX = 64 << 10
"""Maximum characters of a message or a traceback. The executor masks secrets and then shortens further."""


_FAULTS_OF_CODE = (LookupError, NameError, AttributeError, TypeError, ImportError, AssertionError)
"""Errors of an `__init__` that concern its own code or an unset variable and would recur; an error about a server that
does not answer may pass."""


class Unloadable(Exception):
    """The function cannot be loaded here; `permanent` says that a retry would not help."""

    def __init__(self, failure: dict[str, Any], *, permanent: bool) -> None:
        super().__init__(failure["message"])
        self.failure = failure | {"retry": not permanent}


# ---- failures


_OWN = frozenset({__name__, importlib.__name__, "rollout_worker.rewards", "rollout_worker.executors.map_loop"})


def own_frames_off(tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame that is the user's."""
    while tb is not None:
        file, module = tb.tb_frame.f_code.co_filename, tb.tb_frame.f_globals.get("__name__")
        if module not in _OWN and not file.startswith("<frozen importlib"):
            return tb
        tb = tb.tb_next
    return None


def shorten(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 3]}\n[... {len(text) - limit} characters ...]\n{text[-2 * limit // 3 :]}"


def describe(error: BaseException, root: str) -> dict[str, Any]:
    """Return type, message and the user's part of the traceback, with paths as in the code directory."""
    told = traceback.TracebackException(type(error), error, own_frames_off(error.__traceback__), compact=True)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the user's __str__
        message = "(its message cannot be made: __str__ fails)"
    text = "".join(told.format())
    if root:
        text = text.replace(root + os.sep, "")
    return {
        "code": "out_of_memory" if isinstance(error, MemoryError) else "exception",
        "type": type_name(type(error)),
        "message": shorten(message, TEXT_MAX),
        "traceback": shorten(text.rstrip(), TEXT_MAX),
        "retry": getattr(error, "retry", True) is not False,
    }


# ---- the function


Arguments = dict[str, Any]
"""Optional JSON values: `before` the row, `args` after it, `kwargs`."""


def load(target: str, root: str, arguments: Arguments) -> tuple[Callable[..., Any], Arguments]:
    """Return what `target` names and its arguments beside the row.

    It is a function, or an instance of a class made here with the arguments, which then takes none. Raises Unloadable.
    """
    module_name, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise Unloadable(missing(error, module_name, root), permanent=True) from error
    except BaseException as error:
        failure = describe(error, root)
        failure["message"] = f"importing {module_name} failed: {failure['type']}: {failure['message']}"
        raise Unloadable(failure, permanent=True) from error
    for part in name.split("."):
        if not hasattr(found, part):
            file = str(getattr(found, "__file__", None) or "built in")
            message = f"module {module_name} ({file.removeprefix(root + os.sep)}) has no {name!r}"
            raise Unloadable(_plain("AttributeError", message), permanent=True)
        found = getattr(found, part)
    if isinstance(found, type):
        try:
            found = found(*arguments.get("args", ()), **arguments.get("kwargs", {}))
            arguments = {}
        except BaseException as error:
            failure = describe(error, root)
            failure["message"] = f"{target}() failed: {failure['type']}: {failure['message']}"
            raise Unloadable(failure, permanent=isinstance(error, _FAULTS_OF_CODE) or not failure["retry"]) from error
    if not callable(found):
        raise Unloadable(_plain("TypeError", f"{target} is {a_type(found)}, which cannot be called"), permanent=True)
    return found, arguments


def missing(error: ModuleNotFoundError, module_name: str, root: str) -> dict[str, Any]:
    name = error.name or ""
    if module_name == name or module_name.startswith(name + "."):
        where = (
            "neither in the code directory nor installed" if root else "not installed, and there is no code directory"
        )
        return _plain("ModuleNotFoundError", f"there is no module {name!r} on this worker: it is {where}")
    failure = describe(error, root)
    failure["message"] = (
        f"{module_name} imports {name!r}, which is not on this worker: install it for {sys.executable} there, or put "
        "it into the code directory"
    )
    return failure


def _plain(kind: str, message: str) -> dict[str, Any]:
    return {"code": "exception", "type": kind, "message": message, "traceback": "", "retry": True}


def is_async(function: Callable[[Any], Any]) -> bool:
    """Return whether several calls can run concurrently in one event loop."""
    method = getattr(type(function), "__call__", None) if not hasattr(function, "__code__") else function  # noqa: B004
    code: Any = getattr(method, "__code__", None)
    return code is not None and bool(code.co_flags & _CO_COROUTINE)


def with_arguments(function: Callable[..., Any], arguments: Arguments) -> Callable[[Any], Any]:
    """Return a function of the row alone."""
    if not arguments:
        return function
    before, after, named = (arguments.get(name, ()) for name in ("before", "args", "kwargs"))
    return lambda row: function(*before, row, *after, **dict(named))


def rows_at_once(function: Callable[[Any], Any], target: str, asked: int) -> int:
    """Return the number of concurrent rows. `asked` is 0 if the run sets none. Raises Unloadable if the function does
    not support it."""
    if is_async(function):
        return asked or AT_ONCE
    if asked > 1:
        message = (
            f"{target} is no `async def` function, so its process runs one row at a time: leave out "
            "concurrency_per_process, or set 1; more rows at once take more workers"
        )
        raise Unloadable(_plain("TypeError", message), permanent=True)
    return 1


class Caller:
    """Calls the function; coroutines run in one lasting event loop, so that sessions made in it last too."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._runner: Any = None

    def __call__(self, row: Any) -> Any:
        result = self._function(row)
        return self._wait(result) if hasattr(result, "__await__") else result

    def _wait(self, awaitable: Any) -> Any:
        if self._runner is None:
            import asyncio  # only for functions that need it: it is a third of this process's start

            self._runner = asyncio.Runner()

        async def whole() -> Any:
            return await awaitable

        return self._runner.run(whole())


# ---- the output


class Marks:
    """Marks in the output for which row it was printed. A row that prints nothing costs nothing.

    Output that bypasses Python's own streams, such as that of a program the function starts, has no row unless the row
    has printed before.
    """

    def __init__(self) -> None:
        self.number = 0
        self.number_now: Callable[[], int] | None = None  # where several rows print by turns
        self.marked = 0
        for fd, name in ((1, "stdout"), (2, "stderr")):
            known = getattr(sys, name)
            stream = io.TextIOWrapper(
                _Marking(fd, self), known.encoding, known.errors, write_through=True, line_buffering=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)

    def begin(self, number: int) -> None:
        self.number = number
        if self.marked:
            self._write(b"")

    def printing(self) -> None:
        number = self.number if self.number_now is None else self.number_now()
        if self.marked != number:
            self._write(b"%d" % number if number else b"")
            self.marked = number

    def _write(self, number: bytes) -> None:
        self.marked = 0
        with suppress(OSError):  # the function closed it
            os.write(1, MARK + number + b"\n")


class _Marking(io.FileIO):
    def __init__(self, fd: int, marks: Marks) -> None:
        super().__init__(fd, "w", closefd=False)
        self._marks = marks

    def write(self, data: Any, /) -> int:
        self._marks.printing()
        return super().write(data)


# ---- the loop


class Process:
    def __init__(self, rows: socket.socket, results: socket.socket, dump: int) -> None:
        self._rows = rows
        self._results = results
        self._dump = dump
        self._pid = os.getpid()
        self._root = ""
        self._marks = Marks()

    def _send(self, kind: int, number: int, seconds: float, body: bytes) -> None:
        try:
            send(self._results, kind, NUMBER.pack(number, seconds), body)
        except OSError:  # the function closed it, or wrote to it: the executor sees that, ends this process and says so
            time.sleep(UNHEARD_S)
            os._exit(1)

    def main(self) -> NoReturn:
        init = loads(self._rows.recv(1 << 20))
        self._root = init["root"]
        if init["pycache"]:
            sys.pycache_prefix = init["pycache"]  # the code directory is shared and stays as it is
        if self._root:
            import_from(self._root)
        began = time.perf_counter()
        try:
            function, arguments = load(init["target"], self._root, init["arguments"])
            at_once = rows_at_once(function, init["target"], init["at_once"])
        except Unloadable as error:
            self._only_parent(error)
            self._send(LOAD_FAILED, 0, time.perf_counter() - began, dumps(error.failure).encode())
            os._exit(0)
        self._only_parent(None)
        self._send(LOADED, 0, time.perf_counter() - began, dumps({"at_once": at_once}).encode())
        function = with_arguments(function, arguments)
        if at_once > 1:
            self._run_together(function, at_once)
        call = Caller(function)
        while True:
            message = self._rows.recv(1 << 20)
            if not message:
                os._exit(0)
            number, payload = self._read(message)
            self._marks.begin(number)
            self._row(call, number, payload)

    def _read(self, message: bytes) -> tuple[int, bytes]:
        """Return the number of a row, and its JSON."""
        how, number = ROW.unpack_from(message)
        if how == INLINE:
            return number, message[ROW.size :]
        path = message[ROW.size :].decode()
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib would cost every process its import
            payload = file.read()
        os.unlink(path)  # noqa: PTH108
        return number, payload

    def _row(self, call: Caller, number: int, payload: bytes) -> None:
        began = time.perf_counter()
        try:
            row = loads(payload)
            began = time.perf_counter()
            result = call(row)
            seconds = time.perf_counter() - began
            self._returned(number, result, seconds)
        except BaseException as error:  # noqa: BLE001 - the user's function: whatever it raises fails its row
            self._raised(number, error, time.perf_counter() - began)

    def _run_together(self, function: Callable[[Any], Any], at_once: int) -> NoReturn:
        from rollout_worker.executors import map_loop  # brings asyncio, as Caller does

        self._marks.number_now = map_loop.ROW_OF_CONTEXT.get
        holder = map_loop.Holder(self._dump)

        async def perform(number: int, payload: bytes, is_cancelled: Callable[[], bool]) -> None:
            began = time.perf_counter()
            try:
                row = loads(payload)
                began = time.perf_counter()
                result = await function(row)
                seconds = time.perf_counter() - began
                if not is_cancelled():
                    self._returned(number, result, seconds)
            except BaseException as error:  # noqa: BLE001 - as above
                if not is_cancelled():
                    self._raised(number, error, time.perf_counter() - began)

        def cancelled(number: int, where: str) -> None:
            self._send(CANCELLED, number, 0.0, dumps({"where": where}).encode())

        map_loop.run(
            lambda: map_loop.Rows(
                self._rows, self._results, at_once, holder, read=self._read, perform=perform, cancelled=cancelled
            )
        )

    def _returned(self, number: int, result: Any, seconds: float) -> None:
        self._only_parent(None)
        try:
            body = encode_result(result)
        except (ValueError, TypeError, RecursionError) as error:
            failure = _plain("TypeError", f"the function returned what is no JSON: {error}")
            self._send(FAILED, number, seconds, dumps(failure | {"code": "not_json", "retry": False}).encode())
        else:
            self._send(RESULT, number, seconds, body)

    def _raised(self, number: int, error: BaseException, seconds: float) -> None:
        self._only_parent(error)
        self._send(FAILED, number, seconds, dumps(self._failure(error)).encode())

    def _failure(self, error: BaseException) -> dict[str, Any]:
        failure = describe(error, self._root)
        if isinstance(error, SystemExit):
            failure["message"] = f"the function called sys.exit({error.code!r}): raise an exception to fail a row"
        return failure

    def _only_parent(self, error: BaseException | None) -> None:
        """End a fork that the function made and that returned from it: it must not answer as well."""
        if os.getpid() == self._pid:
            return
        code = error.code if isinstance(error, SystemExit) else int(error is not None)
        os._exit(code if isinstance(code, int) else 1)


def main() -> None:
    rows = socket.socket(fileno=int(sys.argv[1]))
    results = socket.socket(fileno=int(sys.argv[2]))
    dump = int(sys.argv[3])
    for end in (rows.fileno(), results.fileno(), dump):
        os.set_inheritable(end, False)  # programs that the function starts have no part in this
    die_with_parent(int(sys.argv[4]))  # where it cannot, the worker ends the whole group anyway
    # The runner ignores these, and what is ignored stays so in every program that the function starts.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(dump)  # not into the output: it shows our frames too
    faulthandler.register(signal.SIGUSR2, dump)  # the executor asks where a row hangs
    sys.argv = [sys.argv[0]]
    Process(rows, results, dump).main()


if __name__ == "__main__":
    main()
