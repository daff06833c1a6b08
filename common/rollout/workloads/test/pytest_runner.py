"""pytest for `rollout test`, run by path with the project's own Python (3.8 or newer, pytest 7 or newer):

    PYTHON pytest_runner.py collect --out FD|PATH [arguments of pytest]
    PYTHON pytest_runner.py run TOKEN [arguments of pytest]

`collect` writes a JSON object a line:
  {"case": {"id", "file", "line", "scope", "markers", "session"}}
  {"collect_error": {"id", "message", "details"}}: a file or a test that cannot be used
  {"collect_skip": {"id", "message"}}: a file that skips itself when it is imported
  {"note": what the person should know}
  {"collected": number of cases, "pytest": its version, "rootdir": what ids and files are relative to}
It exits with 0 after the last of them, else with pytest's own exit code, and pytest's words on stderr or stdout.

`run` reads a JSON object a line from stdin until its end, {"run": [ids]} or {"end": true} for the end of the
fixtures of the session, and keeps what it collected and these fixtures from one to the next. What tests print goes to
stdout and stderr as it comes, and between it go frames: MARK, TOKEN, "+" (the event goes on) or "." (it ends), four
hexadecimal digits of size, and so many bytes of an event:
  {"ready": pytest's version, "pid"}    {"collecting": file}    {"start": id, "at": Unix seconds}
  {"end": id, "outcome", "phase", "seconds", "message", "details"}    {"done": number of tests}
  {"stopped": why pytest ends in the middle}
  {"closed": what failed in the end of fixtures of the session, "details": where}
On stderr there is a frame without an event where a test starts, and one before its end is told.

It imports nothing of Rollout. Options that would spread, stop or repeat tests by themselves have no effect here.
"""

from __future__ import annotations

import atexit
import dis
import faulthandler
import io
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

if __name__ == "__main__":
    # Not the directory of this file, whose modules have names of others (bisect, trace); the current one, as with
    # `python -m pytest`.
    sys.path[0] = os.getcwd()

try:
    import pytest
    from _pytest._io import TerminalWriter
except (ImportError, AttributeError) as error:
    HIDING = sorted(
        {
            file
            for module in list(sys.modules.values())
            for file in [getattr(module, "__file__", None)]
            if file and file != __file__ and os.path.dirname(file) == sys.path[0]
        }
    )
    if HIDING:
        sys.exit(
            f"pytest cannot be imported by {sys.executable}: {', '.join(HIDING)} has the name of a module that pytest "
            f"needs, and is imported in its place ({error}): rename it"
        )
    sys.exit(f"pytest cannot be imported by {sys.executable}: {error}. Install pytest there, or name another Python")

_dumps, _loads, _write = json.JSONEncoder().encode, json.JSONDecoder().decode, os.write
_getpid, _exit, _time, _clock, _sleep = os.getpid, os._exit, time.time, time.perf_counter, time.sleep
"""Saved before a test can replace them."""
MARK = b"\x1e"
FRAME_MAX = 4096
"""Bytes that a pipe writes atomically, whoever else writes to it."""
LOST = 97
"""Exit code if a test closed the descriptors that this process needs."""
LEAVE_S = 30
"""Time limit in seconds for the clean-up after the last test."""
EXEC_S, EXEC_TRIES = 1.0, 200
ID_MAX = 8 << 10
TEXT_MAX = 64 << 10
"""Characters kept of a text: the first and the last half."""

_WITHOUT_EFFECT: dict[str, Any] = {
    "numprocesses": 0, "maxprocesses": None, "dist": "no", "distload": False, "tx": [], "looponfail": False,
    "maxfail": 0, "usepdb": False, "trace": False,
    "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False, "stepwise_skip": False,
    "xmlpath": None, "htmlpath": None,
}  # fmt: skip
"""Options of pytest, pytest-xdist and pytest-html. Several processes would write to the files of the last."""


def shorten(text: str) -> str:
    if len(text) <= TEXT_MAX:
        return text
    half = (TEXT_MAX - 64) // 2  # the sentence between is shorter than the rest
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def clean(text: str) -> str:
    """Return text that can be written as UTF-8: file names may contain other bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Tamed:
    """Prevents options of the project (`addopts`) from distributing, stopping or reordering the tests."""

    measures = False
    """Whether `--cov` was given."""

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Iterator[None]:
        if hasattr(early_config.known_args_namespace, "cov_source"):
            self.measures = bool(early_config.known_args_namespace.cov_source)
            early_config.known_args_namespace.cov_source = []  # pytest-cov measures one process, and writes one file
        yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Iterator[None]:
        for name, value in _WITHOUT_EFFECT.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        plugins = session.config.pluginmanager
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):  # they write what a run of everything came to
            if plugins.has_plugin(name):
                plugins.unregister(name=name)


def crash_line(report: Any) -> str:
    """Return the error of a report as one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    errors = [line[1:] for line in lines if line.startswith("E  ")]
    return shorten(clean((lines[0] if crash is not None else [*lines[-1:], *errors[:1]][-1]).strip()))


def place_of(error: BaseException) -> str:
    """Return the error and its frames, without those of pytest and of this file."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and f"{os.sep}_pytest{os.sep}" not in frame.filename
    ]
    return "".join([*traceback.format_list(frames), *traceback.format_exception_only(type(error), error)])


def text_of(report: Any) -> str:
    """Return the report's `longreprtext`, but with the indent of its first line."""
    out = io.StringIO()
    writer = TerminalWriter(out)
    writer.hasmarkup = False
    report.toterminal(writer)
    return out.getvalue().strip("\n")


def skip_reason(report: Any) -> str:
    where: Any = report.longrepr
    reason = str(cast(Any, where)[2] if isinstance(where, tuple) else where or "")
    return shorten(clean(reason[9:] if reason.startswith("Skipped: ") else reason))


# ---- collect


class Collector(Tamed):
    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self.whole = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = text_of(report)
            self._error(report.nodeid, crash_line(report) or "it cannot be collected", shorten(clean(text)))
        elif report.skipped:
            self._write(collect_skip={"id": clean(report.nodeid), "message": skip_reason(report)})

    def _error(self, nodeid: str, message: str, details: str = "") -> None:
        self._write(collect_error={"id": shorten(clean(nodeid)), "message": message, "details": details})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Report the collected tests where pytest would run them."""
        items: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            items.setdefault(item.nodeid, []).append(item)
        cases = 0
        scopes = Scopes(session.items)
        for nodeid, same in items.items():
            if len(same) > 1:
                self._error(nodeid, duplicates(len(same)))
            elif len(nodeid) > ID_MAX:
                message = (
                    f"the id of this test has {len(nodeid)} characters, {ID_MAX} are the most: give its parameters ids"
                )
                self._error(nodeid, message)
            elif clean(nodeid) != nodeid:
                self._error(
                    nodeid, "the id of this test is no Unicode text: rename its file, or give its parameters ids"
                )
            else:
                self._write(case=case(same[0], scopes.of(same[0])))
                cases += 1
        if self.measures:
            self._write(note="--cov has no effect: coverage is not measured")
        self._write(collected=cases, pytest=pytest.__version__, rootdir=str(session.config.rootpath))
        self.whole = True
        return True


def duplicates(count: int) -> str:
    return (
        f"{count} tests have this id, so none can be told from the others: give parameters ids of their own, or name "
        "no file twice"
    )


def case(item: pytest.Item, scope: str) -> dict[str, Any]:
    file, line, _ = item.location
    markers = list(dict.fromkeys(mark.name for mark in item.iter_markers()))
    return {
        "id": item.nodeid,
        "file": clean(file.replace(os.sep, "/")),
        "line": 0 if line is None else line + 1,
        "scope": scope,
        "markers": [clean(name) for name in markers],
        "session": session_fixtures(item),
    }


def session_fixtures(item: pytest.Item) -> list[str]:
    """Return fixtures of the project and of plugins that live until the process ends, as signatures show them. A
    skipped test uses none."""
    if item.get_closest_marker("skip") is not None:
        return []
    return sorted(
        {
            clean(f"{one.baseid}::{one.argname}")
            for definitions in _fixtures(item).values()
            for one in definitions
            if one.scope in ("session", "package") and not str(one.func.__module__).startswith("_pytest.")
        }
    )


class Scopes:
    """Decides which tests stay together: those of a class, and those of a module if they use its fixtures
    (`setup_module` is one) or if one of them assigns to a global variable.

    Fixtures of a session or a package are made anew in each process, as with pytest-xdist.
    """

    def __init__(self, items: list[pytest.Item]) -> None:
        self._of_module = {_class(item) for item in items if "module" in _fixture_scopes(item)} - {""}
        self._with_state = {_parent(item, pytest.Module) for item in items if _assigns_global(item)} - {""}

    def of(self, item: pytest.Item) -> str:
        group = item.get_closest_marker("xdist_group")
        if group is not None:
            name = group.kwargs.get("name", group.args[0] if group.args else "default")
            return f"@{clean(str(name))}"
        module, of_class = _parent(item, pytest.Module), _class(item)
        if module in self._with_state or of_class in self._of_module or "module" in _fixture_scopes(item):
            return module
        return of_class


_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


def _assigns_global(item: pytest.Item) -> bool:
    code = getattr(getattr(item, "function", None), "__code__", None)
    return code is not None and _STORE_GLOBAL in code.co_code[::2]


def _fixtures(item: pytest.Item) -> dict[str, Any]:
    info = getattr(item, "_fixtureinfo", None)
    return info.name2fixturedefs if info is not None else {}


def _fixture_scopes(item: pytest.Item) -> set[str]:
    return {definition.scope for definitions in _fixtures(item).values() for definition in definitions}


def _class(item: pytest.Item) -> str:
    return _parent(item, pytest.Class)


def _parent(item: pytest.Item, kind: type[pytest.Collector]) -> str:
    parent = item.getparent(kind)
    return parent.nodeid if parent is not None else ""


def collect(out: str, arguments: list[str]) -> int:
    with open(int(out) if out.isdigit() else out, "w", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")

        collector = Collector(write)
        code = int(pytest.main([*arguments, "--collect-only", "-qq"], plugins=[collector]))
    return 0 if collector.whole else code or 1


# ---- run


class Link:
    """The connection to the parent process, on descriptors that tests are unlikely to touch."""

    def __init__(self, token: str) -> None:
        self.pid = os.getpid()
        self._head = MARK + token.encode()
        self._commands = open(_private(0), "rb", buffering=0)  # noqa: SIM115
        self._heard = bytearray()
        self.ends = {1: _private(1), 2: _private(2)}
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def tell(self, **event: Any) -> None:
        body = _dumps(event).encode()
        room = FRAME_MAX - len(self._head) - 5
        for at in range(0, len(body), room):
            part = body[at : at + room]
            self._frame(1, b"." if at + room >= len(body) else b"+", part)

    def mark_stderr(self) -> None:
        self._frame(2, b".", b"")

    def _frame(self, end: int, kind: bytes, part: bytes) -> None:
        self.only_parent()
        data = self._head + kind + b"%04x" % len(part) + part
        try:
            while data:
                try:
                    data = data[_write(self.ends[end], data) :]
                except BlockingIOError:  # a test made it so: it is the same open file
                    select.select([], [self.ends[end]], [])
        except OSError:
            _exit(LOST)

    def hear(self) -> dict[str, Any] | None:
        """Return the next command, or None after the last."""
        while b"\n" not in self._heard:
            try:
                data = self._commands.read(1 << 16)
            except OSError:
                _exit(LOST)
            if not data:
                return None
            self._heard += data
        line, _, rest = bytes(self._heard).partition(b"\n")
        self._heard = bytearray(rest)
        return _loads(line.decode())

    def leave(self) -> None:
        """Detach from the parent, which may end now; the session's fixtures still get their time."""
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
        null = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null, fd)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LEAVE_S)

    def only_parent(self) -> None:
        """End this process if it is a fork that a test made and returned from: it must not run the other tests as
        well."""
        if _getpid() != self.pid:
            _exit(0)


def _private(fd: int) -> int:
    """Duplicate a descriptor to a high number, because programs close the low ones. Children do not inherit it."""
    import fcntl

    for least in (900, 3):
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
        except OSError:  # the limit of open files is lower
            continue
    sys.exit("no descriptor can be copied: the limit of open files is too low (ulimit -n)")


class Surroundings:
    """Restores the process state that a test must not change, unless the test or its fixtures restored it.

    Changes that fixtures make before the test and undo later are left alone.
    """

    _SIGNALS = tuple(
        getattr(signal, name)
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2")
        if hasattr(signal, name)
    )

    def __init__(self, ends: dict[int, int]) -> None:
        self._ends = ends
        self._streams: tuple[Any, Any] = (None, None)
        self._input = NoInput()
        self._before = self._after = self._now()

    def _now(self) -> tuple[Any, ...]:
        try:
            directory = os.getcwd()
        except OSError:
            directory = ""
        return (directory, *[signal.getsignal(number) for number in self._SIGNALS])

    def begin_call(self) -> None:
        self._before = self._now()

    def end_call(self) -> None:
        self._after = self._now()

    def restore(self) -> None:
        """Restore the state, after the test's fixtures have ended."""
        if self._after != self._before:
            now = self._now()
            for at, (before, after) in enumerate(zip(self._before, self._after)):
                if before == after or now[at] != after:
                    continue
                if at:
                    signal.signal(self._SIGNALS[at - 1], before if before is not None else signal.SIG_DFL)
                elif before:
                    os.chdir(before)
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._after = self._before
        self.open_streams()

    def open_streams(self) -> None:
        """Connect stdout and stderr, those of Python and those of the process, to the parent again."""
        for fd, end in self._ends.items():
            try:
                os.dup2(end, fd)
            except OSError:
                _exit(LOST)
        if any(stream is None or stream.closed for stream in self._streams):
            self._streams = (_stream(1), _stream(2))
        sys.stdout, sys.stderr = self._streams
        sys.stdin = cast(Any, self._input)


def _stream(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(cast(Any, raw), "utf-8", "backslashreplace", newline="", write_through=True)


class Children:
    """Finds processes that a test started and that outlive it and its fixtures. Those of wider fixtures may live on."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._after: set[int] = set()
        self._in_call = False
        self._left: set[int] = set()

    def begin_call(self) -> None:
        self._before, self._in_call = _children(_getpid()), True

    def end_call(self) -> None:
        self._after = _children(_getpid()) - self._before if self._in_call else set()
        self._in_call = False

    def belong_to_fixture(self) -> None:
        self._in_call = False

    def left_by_test(self) -> list[str]:
        left, self._after = self._after and self._after & _children(_getpid()), set()
        # multiprocessing keeps helpers for as long as its process lives.
        found = {
            pid: command
            for pid, command in ((pid, _command(pid)) for pid in left)
            if command and "multiprocessing." not in command
        }
        self._left.update(found)
        return [f"process {pid} ({command})" for pid, command in found.items()]

    def end_left(self) -> None:
        for pid in self._left & _children(_getpid()):
            for one in [pid, *_below(pid)]:
                try:
                    os.kill(one, signal.SIGKILL)
                except OSError:
                    continue
        self._left = set()


def _children(pid: int) -> set[int]:
    """Return the children that are still running; none without /proc."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
    except OSError:
        pass
    return found


def _below(pid: int) -> list[int]:
    return [one for child in _children(pid) for one in (child, *_below(child))]


def _command(pid: int) -> str:
    """Return the command line, or "" for a zombie."""
    try:
        for _ in range(EXEC_TRIES):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
            with open(f"/proc/{pid}/stat", "rb") as file:
                has_ended = file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
            if command or has_ended:
                return command
            _sleep(EXEC_S / EXEC_TRIES)  # it has none in the midst of exec
    except OSError:
        pass
    return ""


VANISHED = (
    "this test is not there any more, though it was when tests were collected: parameters that are drawn by chance, or "
    "depend on time, on the machine or on the order of a set, need ids of their own"
)


def verdict(reports: list[pytest.TestReport]) -> tuple[str, str, str, str]:
    """Return outcome, phase, message and details of a test with these reports."""
    reports = [report for report in reports if cast(str, report.outcome) != "rerun"]  # of pytest-rerunfailures
    failed = [report for report in reports if report.failed]
    if failed:
        worst = next((report for report in failed if report.when == "call"), failed[0])
        details = [text_of(report) for report in failed]
        logged = [f"{name}:\n{text}" for name, text in worst.sections if name.startswith("Captured log")]
        outcome = "failed" if worst.when == "call" else "error"
        return outcome, worst.when or "", crash_line(worst), shorten(clean("\n".join([*details, *logged])))
    for report in reports:
        if hasattr(report, "context"):  # of a subtest
            continue
        expected = getattr(report, "wasxfail", None)
        if expected is not None and report.when != "teardown":
            outcome = "xfailed" if report.skipped else "xpassed" if report.when == "call" else ""
            if outcome:
                reason = str(expected)
                return outcome, report.when, shorten(clean(reason[8:] if reason.startswith("reason: ") else reason)), ""
        elif report.skipped and report.when != "teardown":
            return "skipped", report.when or "", skip_reason(report), ""
    if not reports:
        return "error", "setup", "a plugin ran this test, and reported no outcome", ""
    return "passed", "", "", ""


class NoInput(io.TextIOBase):
    """The stdin of tests: as with pytest's own capture, reading it fails."""

    encoding = "utf-8"

    def read(self, size: int | None = -1) -> str:
        raise OSError("reading from stdin while output is captured")

    readline = cast(Any, read)


class Sink(io.TextIOBase):
    """Accepts text and discards it."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)


class Rest(pytest.Item):
    """A placeholder after the last test of a batch: fixtures of the session stay for the next batch, all others end."""

    def runtest(self) -> None:
        raise NotImplementedError


class Runner(Tamed):
    def __init__(self, link: Link) -> None:
        self._link = link
        self._begun = False
        self._arguments: list[str] = []
        self._has_all = False
        self._collected: set[str] = set()
        self._items: dict[str, list[pytest.Item]] = {}
        self._directories: dict[Any, Any] = {}
        self._faults: dict[str, Any] = {}  # reports of collectors that failed or skipped, by node id
        self._unusable: dict[str, str] = {}  # why a file cannot be collected at all
        self._reports: list[pytest.TestReport] = []
        self._around = Surroundings(link.ends)
        self._children = Children()

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Hide the output of pytest itself: its reporter uses the stdout that it finds here."""
        sys.stdout = Sink()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        super().pytest_sessionstart(session)
        self._around.open_streams()

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        self._link.tell(stopped=shorten(clean(excinfo.exconly())))

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._link.tell(stopped=shorten(clean(f"pytest failed: {str(excrepr).splitlines()[-1]}")))

    # ---- what is collected

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool | None:
        """Collect nothing at first: an empty collection would drop fixtures of a conftest.py that is already loaded."""
        if self._begun:
            return None
        self._begun = True
        self._arguments = list(session.config.args)
        self._link.tell(ready=pytest.__version__, pid=self._link.pid)
        return True

    @pytest.hookimpl(hookwrapper=True, optionalhook=True)
    def pytest_collect_directory(self, path: Any) -> Generator[None, Any, None]:
        """Return the same node for each collection, because fixtures of a conftest.py belong to the node."""
        made = yield
        if made.get_result() is not None:
            made.force_result(self._directories.setdefault(path, made.get_result()))

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        if isinstance(collector, pytest.File):
            self._link.tell(collecting=clean(collector.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._faults[report.nodeid] = report

    def _collect(self, session: pytest.Session, arguments: list[str]) -> None:
        session.config.args = arguments
        try:
            session.config.hook.pytest_collection(session=session)
        except pytest.UsageError as error:
            if len(arguments) > 1:
                for argument in arguments:
                    self._collect(session, [argument])
            else:
                self._unusable[arguments[0]] = str(error)
            return
        known = set(self._items)
        for item in session.items:
            if item.nodeid not in known:
                self._items.setdefault(item.nodeid, []).append(item)

    def _need(self, session: pytest.Session, ids: list[str]) -> None:
        root = session.config.rootpath
        files = [str(root / file) for file in dict.fromkeys(nodeid.partition("::")[0] for nodeid in ids)]
        new = [file for file in files if file not in self._collected and os.path.exists(file)]
        self._collected.update(new)
        if new:  # pytest takes what follows a bracket for a parameter
            self._collect(session, [os.path.dirname(file) if "[" in file else file for file in new])
        if not self._has_all and not all(nodeid in self._items or self._fault(nodeid) for nodeid in ids):
            self._has_all = True  # files of other names than their ids say
            self._collect(session, self._arguments)

    def _fault(self, nodeid: str) -> Any:
        """Return the report of the file that has, or would have, this test and could not be collected or was
        skipped."""
        return next(
            (report for at, report in self._faults.items() if nodeid == at or nodeid.startswith(f"{at}::")), None
        )

    # ---- what is run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        while True:
            batch = self._link.hear()
            if batch is None:
                break
            if "end" in batch:
                self._end_session(session)
                continue
            self._batch(session, batch["run"])
            self._children.end_left()
            self._link.tell(done=len(batch["run"]))
        self._link.leave()
        self._end_session(session)
        return True

    def _end_session(self, session: pytest.Session) -> None:
        """End the session's fixtures; later tests make them anew."""
        fault = details = ""
        try:
            cast(Any, session)._setupstate.teardown_exact(None)
        except pytest.skip.Exception:
            pass
        except BaseException as error:  # noqa: BLE001 - fixtures of the user
            fault = shorten(clean(f"{type(error).__name__}: {error}"))
            details = shorten(clean(place_of(error)))
        self._link.tell(closed=fault, details=details)

    def _batch(self, session: pytest.Session, ids: list[str]) -> None:
        self._need(session, ids)
        items: list[pytest.Item] = []
        for nodeid in ids:
            found = self._items.get(nodeid, [])
            if len(found) == 1:
                items.append(found[0])
            else:
                self._not_run(nodeid, len(found))
        session.items = items
        session.testscollected = len(items)
        rest = cast(Any, Rest).from_parent(session, name="(rest)")
        for item, following in zip(items, [*items[1:], rest]):
            self._run(item, following)
            session.shouldfail = session.shouldstop = False

    def _not_run(self, nodeid: str, count: int) -> None:
        outcome, message, details = "error", duplicates(count), ""
        if not count:
            fault = self._fault(nodeid)
            file = nodeid.partition("::")[0]
            unusable = [why for argument, why in self._unusable.items() if argument.endswith(file)]
            if fault is not None and fault.skipped:
                outcome, message = "skipped", skip_reason(fault)
            elif fault is not None:
                message, details = crash_line(fault), shorten(clean(text_of(fault)))
            else:
                message = unusable[0] if unusable else VANISHED
        self._link.tell(start=nodeid, at=_time())
        self._link.mark_stderr()
        self._link.mark_stderr()
        self._end(nodeid, outcome, "collect", 0.0, message, details)

    def _end(self, nodeid: str, outcome: str, phase: str, seconds: float, message: str, details: str) -> None:
        self._link.tell(
            end=nodeid, outcome=outcome, phase=phase, seconds=round(seconds, 6), message=message, details=details
        )

    def _run(self, item: pytest.Item, following: pytest.Item) -> None:
        self._reports = []
        self._link.mark_stderr()
        self._link.tell(start=item.nodeid, at=_time())
        began = _clock()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        seconds = _clock() - began
        self._around.restore()
        self._link.mark_stderr()
        outcome, phase, message, details = verdict(self._reports)
        left = self._children.left_by_test()
        if left and not message:
            message = f"it left behind: {', '.join(left)}"
        self._end(item.nodeid, outcome, phase, seconds, message, details)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._around.begin_call()
        self._children.begin_call()
        yield
        self._link.only_parent()
        self._around.end_call()
        self._children.end_call()

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function":
            self._children.belong_to_fixture()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._link.only_parent()
        self._reports.append(report)


def run(token: str, arguments: list[str]) -> int:
    link = Link(token)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR2, link.ends[2])  # whoever started this asks where a test hangs
    code = int(pytest.main([*arguments, "-s"], plugins=[Runner(link)]))
    cast(Any, atexit)._run_exitfuncs()
    _exit(code)  # threads that never end keep nobody waiting


def main() -> int:
    words = sys.argv[1:]
    taken = {"collect": 3, "run": 2}.get(words[0] if words else "", 0)
    if not taken or len(words) < taken:
        sys.exit(
            "usage: pytest_runner.py collect --out FD|PATH [arguments], or: pytest_runner.py run TOKEN [arguments]"
        )
    sys.argv = ["pytest", *words[taken:]]
    return collect(words[2], words[3:]) if taken == 3 else run(words[1], words[2:])


if __name__ == "__main__":
    sys.exit(main())
