"""Runs detectors in a forked child, with or without a safeguard, and counts what was noticed.

A fork has everything imported already, and whatever the removal breaks in it (threads that hang, files, settings) ends
with it. The caller must be a process without threads.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from removal import Edit, StaleEditError, removed

ROOT = Path(__file__).resolve().parents[2]
HANG = "it never ends"
Write = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Outcome:
    """What became of a set of detectors: each test's `passed`, `skipped` or reason of failure, and seeds by invariant."""

    tests: dict[str, str] = field(default_factory=dict[str, str])
    seeds: int = 0
    invariants: Counter[str] = field(default_factory=Counter[str])
    trouble: str = ""  # the detectors could not be run at all

    @property
    def caught(self) -> list[str]:
        """Tests that failed."""
        return [name for name, end in self.tests.items() if end not in ("passed", "skipped")]

    @property
    def skipped(self) -> list[str]:
        return [name for name, end in self.tests.items() if end == "skipped"]


class Tests:
    """Every test of some files, collected once; each `run` is a forked child of this very session."""

    def __init__(self, session: pytest.Session, limit_s: float) -> None:
        self._session = session
        self._limit_s = limit_s
        self._items = {str(item.nodeid).removeprefix("tests/"): item for item in session.items}

    def of(self, node: str) -> list[pytest.Item]:
        """A test, all its parameters, or a file. StaleEditError if there is none."""
        found = [
            item
            for name, item in self._items.items()
            if name == node or (name.startswith(node) and name[len(node)] in "[:")
        ]
        if not found:
            raise StaleEditError(f"there is no test {node}")
        return found

    def run(self, nodes: Sequence[str], edits: Sequence[Edit] = (), *, first: bool = False) -> Outcome:
        """`first` ends at the first failure."""
        items = list(dict.fromkeys(item for node in nodes for item in self.of(node)))
        hook = self._session.config.hook
        recorder = Recorder()

        def work(write: Write) -> None:
            recorder.write = write
            self._session.config.pluginmanager.register(recorder)
            for item, following in zip(items, [*items[1:], None], strict=True):
                hook.pytest_runtest_protocol(item=item, nextitem=None if first else following)
                if first and recorder.failed:
                    return

        return _forked(work, edits, limit_s=60.0 + self._limit_s * 2 * len(items))


class Recorder:
    """A pytest plugin that writes how each test ended."""

    write: Write

    def __init__(self) -> None:
        self._ended: dict[str, str] = {}

    @property
    def failed(self) -> bool:
        return any(end != "skipped" for end in self._ended.values())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write({"test": nodeid, "end": HANG})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message).splitlines()[0] if crash is not None else lines[-1] if lines else "failed"
            self._ended.setdefault(report.nodeid, reason[:200] or "failed")
        elif report.skipped:
            self._ended.setdefault(report.nodeid, "skipped")
        if report.when == "teardown":
            self.write({"test": report.nodeid, "end": self._ended.get(report.nodeid, "passed")})


def with_tests(nodes: Sequence[str], use: Callable[[Tests], None], limit_s: float = 120.0) -> None:
    """Collects the files of `nodes` and calls `use` with them. StaleEditError if they cannot be collected.

    A test that takes longer than `limit_s` seconds has failed: what it waits for never comes.
    """
    failures: list[BaseException] = []

    class Loop:
        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                failures.append(StaleEditError(f"{report.nodeid} cannot be collected: {report.longrepr}"))

        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            if not failures:
                gc.collect()
                gc.freeze()  # what is shared with a child stays shared
                try:
                    use(Tests(session, limit_s))
                except BaseException as error:  # noqa: BLE001 - raised below, past pytest
                    failures.append(error)
            return True

    files = list(dict.fromkeys(node.partition("::")[0] for node in nodes))
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal", "-o", f"timeout={limit_s}"]
    _no_example_database()
    code = pytest.main(
        [*options, "-W", "ignore::pytest.PytestAssertRewriteWarning", *(f"{ROOT}/tests/{file}" for file in files)],
        plugins=[Loop()],
    )
    if failures:
        raise failures[0]
    if code not in (0, 5):
        raise StaleEditError(f"pytest ended with {code!s}")


def load_simulation() -> Any:
    place = str(ROOT / "tests" / "sim")
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module("simulate")


def run_seeds(seeds: range, edits: Sequence[Edit] = (), *, first: bool = False, limit_s: float = 600.0) -> Outcome:
    """The simulation of tests/sim. What production code raises counts as much as a broken invariant."""

    def work(write: Write) -> None:
        simulation = load_simulation()
        for seed in seeds:
            write({"seed": seed})
            try:
                simulation.simulate(seed)
            except simulation.Violation as violation:
                write({"invariant": str(violation.invariant)})
            except Exception as error:  # noqa: BLE001 - the production code broke in a way of its own
                write({"invariant": f"raised {type(error).__name__}"})
            else:
                continue
            if first:
                return

    return _forked(work, edits, limit_s=limit_s)


def _forked(work: Callable[[Write], None], edits: Sequence[Edit], *, limit_s: float) -> Outcome:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(work, edits, writing)
    os.close(writing)
    lines, timely = _read(reading, time.monotonic() + limit_s)
    for group in (os.killpg, os.kill):
        try:
            group(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(child, 0)
    outcome = Outcome()
    over = False
    for line in lines:
        message = json.loads(line)
        over = over or "over" in message
        outcome.seeds += "seed" in message
        if "test" in message:
            outcome.tests[message["test"]] = message["end"]
        if "invariant" in message:
            outcome.invariants[message["invariant"]] += 1
        outcome.trouble = message.get("trouble", outcome.trouble)
    if not over and not outcome.caught and outcome.seeds:
        outcome.invariants[HANG] += 1
    if not over and not outcome.caught and not outcome.seeds:
        outcome.trouble = outcome.trouble or ("it ended early" if timely else "it never ended")
    return outcome


def _child(work: Callable[[Write], None], edits: Sequence[Edit], writing: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    if not os.environ.get("ABLATION_OUTPUT"):
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)

    def write(message: dict[str, Any]) -> None:
        os.write(writing, json.dumps(message).encode() + b"\n")

    try:
        with removed(list(edits)) if edits else nullcontext():
            work(write)
        write({"over": True})
    except BaseException as error:  # noqa: BLE001 - said to the parent, whatever it is
        write({"trouble": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _no_example_database() -> None:
    """What hypothesis finds without a safeguard must not be tried again by ordinary runs; and it tries the same."""
    from hypothesis import settings

    settings.register_profile("ablation", database=None, derandomize=True)
    settings.load_profile("ablation")


def _read(reading: int, deadline: float) -> tuple[list[bytes], bool]:
    """Lines until the child closes its end; False: it was too late."""
    data = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([pipe], [], [], left)
            if ready:
                piece = pipe.read(65536)
                if not piece:
                    return data.splitlines(), True
                data += piece
    return data.splitlines(), False
