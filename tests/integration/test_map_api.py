"""The Python API, sync and async, on one cluster."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import rollout
from rollout.model.errors import ConfigError, InputError, NotFoundError, StateError
from rollout.workloads.map.client.api import Cluster
from rollout.workloads.map.client.feed import RowsError

FUNCTIONS = """
import time
def double(n):
    if n == 7:
        raise ValueError("seven")
    return 2 * n
def slow(n):
    time.sleep(n)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("map-api") / "code"
    directory.mkdir()
    (directory / "map_api_functions.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Cluster]:
    before = os.umask(0)
    with rollout.local(workers=1, directory=home.parent / "cluster") as found:
        os.umask(before)
        yield found


@pytest.fixture
def double(home: Path) -> Any:
    import map_api_functions  # type: ignore[import-not-found]

    return map_api_functions.double


def test_outcomes_in_order_with_errors_among_them(cluster: Cluster, double: Any) -> None:
    found = list(cluster.map(double, iter(range(1000)), max_attempts=1))
    assert [outcome.row for outcome in found] == list(range(1, 1001))
    assert [outcome.result for outcome in found if outcome.ok] == [2 * n for n in range(1000) if n != 7]
    (failed,) = [outcome for outcome in found if not outcome.ok]
    assert failed.row == 8 and failed.error is not None and failed.error.type == "ValueError"
    assert 'File "map_api_functions.py"' in failed.error.traceback


def test_the_ledger_and_objects_are_readable_by_their_owner_alone(cluster: Cluster, double: Any, home: Path) -> None:
    list(cluster.map(double, [1]))
    place = home.parent / "cluster"
    made = [place, *place.glob("rollout.db*"), place / "objects", *(place / "objects").rglob("*"), place / "cache"]
    assert len(made) > 6
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def test_endless_rows_are_read_within_the_window_and_leaving_kills_the_run(cluster: Cluster, double: Any) -> None:
    read = itertools.count(100)
    with cluster.map(double, read, window=1024) as outcomes:
        for outcome in outcomes:
            if outcome.row == 3000:
                break
        run_id = outcomes.run_id
    assert 3000 <= next(read) - 100 <= 3000 + 1024 + 1024 + 600
    assert cluster.run(run_id).state().state == "killed"


def test_rows_that_come_late_are_not_held_back(cluster: Cluster, double: Any) -> None:
    arrived: list[float] = []

    def rows() -> Iterator[int]:
        for n in range(3):
            arrived.append(time.monotonic())
            yield n
            deadline = time.monotonic() + 20
            while len(seen) <= n and time.monotonic() < deadline:
                time.sleep(0.01)

    seen: list[int] = []
    for outcome in cluster.map(double, rows()):
        seen.append(outcome.result)
    assert seen == [0, 2, 4] and arrived[-1] - arrived[0] < 15


def test_what_the_rows_raise_is_raised_and_kills_the_run(cluster: Cluster, double: Any) -> None:
    def rows() -> Iterator[Any]:
        yield 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(cluster.map(double, rows()))
    with pytest.raises(InputError, match=r"row 2\['x'\] is a set"):
        list(cluster.map(double, [1, {"x": {1}}]))

    def leaving() -> Iterator[Any]:
        yield 1
        sys.exit(3)

    with pytest.raises(RowsError, match="the rows raised SystemExit: 3"):
        list(cluster.map(double, leaving()))
    run = cluster.submit(double, rows())
    with pytest.raises(KeyError):
        run.wait()
    assert run.state().state == "killed"


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """Whoever starts the tests in the background of a script has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_raises")
def test_ctrl_c_while_nothing_has_come_is_raised_as_it_is_and_kills_the_run(cluster: Cluster, home: Path) -> None:
    with cluster.map("map_api_functions:slow", [1000.0], code=home) as outcomes:
        timer = threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(outcomes)
        run_id = outcomes.run_id
    assert cluster.run(run_id).state().state == "killed"


def test_a_submitted_run_is_found_again_read_twice_and_cancelled(cluster: Cluster, home: Path) -> None:
    run = cluster.submit("map_api_functions:double", [1, 2, 3], code=home)
    assert run.wait().state == "completed"
    assert [o.result for o in run.results()] == [2, 4, 6]
    assert [o.row for o in cluster.run(run.id[-8:].lower()).results(start=2)] == [2, 3]
    with pytest.raises(NotFoundError):
        cluster.run("zzzz")
    assert {"connect", "local", "map"} <= set(dir(rollout))
    slow = cluster.submit("map_api_functions:slow", [1000.0], code=home)
    slow.cancel()
    slow.cancel()
    assert slow.wait().state == "killed"
    with pytest.raises(rollout.RunEnded, match="killed"):
        list(slow.results())
    assert run.state().done == 3


def connected(cluster: Cluster, home: Path) -> Cluster:
    return rollout.connect(cluster.address, tls_dir=home.parent / "cluster" / "tls")


def test_leaving_at_once_submits_all_rows(cluster: Cluster, double: Any, home: Path) -> None:
    with connected(cluster, home) as other:
        run = other.submit(double, range(10, 6010), window=1024)
    found = cluster.run(run.id)
    assert found.submitted() == 6000
    assert found.wait().done == 6000


def test_submitted_and_leaving_raise_what_the_rows_raised_once(cluster: Cluster, double: Any, home: Path) -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise KeyError("mine")

    with connected(cluster, home) as other:
        assert other.submit(double, [1, 2]).submitted() == 2
        with pytest.raises(KeyError, match="mine"):
            other.submit(double, rows()).submitted()
    with pytest.raises(KeyError, match="mine"), connected(cluster, home) as other:
        other.submit(double, rows())
    cancelled = cluster.submit("map_api_functions:slow", itertools.repeat(1000.0), code=home)
    cancelled.cancel()
    with pytest.raises(rollout.RunEnded, match="killed"):
        cancelled.submitted()


def test_leaving_waits_for_endless_rows_for_a_while_only(
    cluster: Cluster, double: Any, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.workloads.map.client.cluster.LEAVE_S", 0.5)
    with connected(cluster, home) as other:
        run = other.submit(double, itertools.count(10))
    assert cluster.run(run.id).state().state == "killed"
    assert [record.levelname for record in caplog.records if run.id in record.getMessage()] == ["WARNING"]


NEVER_LEFT = """
import sys, rollout
cluster = rollout.connect(sys.argv[1], tls_dir=sys.argv[2]).__enter__()
print(cluster.submit("map_api_functions:double", range(10, 6010), code=sys.argv[3]).id)
raise KeyError("mine")
"""


def test_a_program_that_ends_without_leaving_submits_all_rows(cluster: Cluster, home: Path) -> None:
    program = [sys.executable, "-c", NEVER_LEFT, cluster.address, home.parent / "cluster" / "tls", home]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert "mine" in ended.stderr
    assert cluster.run(ended.stdout.strip()).submitted() == 6000


def test_faults_are_told_before_anything_is_submitted(cluster: Cluster, double: Any, home: Path) -> None:
    for options, said in (
        ({"timeout_s": -1}, "timeout"),
        ({"window": 1}, "window"),
        ({"lane_key": "x"}, "concurrency"),
    ):
        with pytest.raises(ConfigError, match=said):
            cluster.map(double, [1], **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no option tries"):
        cluster.map(double, [1], tries=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="defines no 'treble'"):
        cluster.map("map_api_functions:treble", [1], code=home)
    with pytest.raises(StateError, match="not open"):
        rollout.local().map(double, [])
    function: Any = lambda n: n  # noqa: E731
    function.__qualname__, function.__module__ = "<lambda>", "__main__"
    with pytest.raises(ConfigError, match=r"is a lambda, .* define it at the top of a module, such as functions\.py"):
        cluster.map(function, [1])


def test_a_function_that_no_worker_can_load_ends_its_run_and_the_reason_says_where(
    cluster: Cluster, home: Path
) -> None:
    (home / "broken.py").write_text("import no_such_module\ndef f(n): ...\n")
    with pytest.raises(rollout.RunEnded, match=r'(?s)is failed: .*no_such_module.*\n  File "broken\.py", line 1'):
        list(cluster.map("broken:f", itertools.count(1), code=home))
    run = cluster.submit("broken:f", [1] * 100, code=home)
    ended = run.wait()
    assert (ended.state, ended.done, ended.failed) == ("failed", 0, 0) and "no_such_module" in ended.reason


def test_threads_share_outcomes_each_once(cluster: Cluster, double: Any) -> None:
    outcomes, found = cluster.map(double, range(10, 3000)), list[int]()
    readers = [threading.Thread(target=lambda: found.extend(o.row for o in outcomes)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert sorted(found) == list(range(1, 2991))


def test_another_thread_that_closes_ends_the_waiting(cluster: Cluster, home: Path) -> None:
    outcomes, heard = cluster.map("map_api_functions:slow", [1000.0], code=home), list[BaseException]()

    def read() -> None:
        try:
            next(outcomes)
        except rollout.RunEnded as error:
            heard.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.5)
    outcomes.close()
    reader.join(60)
    assert heard


FORKS = """
import os, signal
from rollout.workloads.map.client.api import Cluster, StateError
from rollout.workloads.map.client.cluster import AsyncCluster
async def nothing(stack):
    return None, None
cluster = Cluster(AsyncCluster(nothing)).__enter__()
child = os.fork()
if not child:
    signal.alarm(30)
    cluster.__exit__(None, None, None)
    try:
        cluster.submit("a:b", [1])
    except StateError as error:
        print(error)
        raise SystemExit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_is_told_and_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("a fork cannot use the cluster of its parent") and ended.stdout.endswith("\n5\n")


LEAVES = """
import itertools, sys, rollout
outcomes = rollout.map("map_api_functions:double", itertools.count(10), code=sys.argv[1])
print(next(outcomes).result)
cluster = rollout.local()
with cluster:
    kept = cluster.map("map_api_functions:double", itertools.count(10), code=sys.argv[1])
try:
    print(list(kept))
except rollout.workloads.map.client.api.StateError as error:
    print(error)
"""


def test_a_program_that_leaves_early_ends_and_outcomes_do_not_seem_to(home: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES, home], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("20\nthe cluster is closed")


async def test_the_same_from_asyncio(cluster: Cluster, double: Any, home: Path) -> None:
    async def rows() -> AsyncIterator[int]:
        for n in range(100, 200):
            yield n

    async with rollout.connect_async(cluster.address, tls_dir=home.parent / "cluster" / "tls") as found:
        assert [o.result async for o in found.map(double, rows())] == [2 * n for n in range(100, 200)]
        async with aclosing(found.map(double, itertools.count(8))) as outcomes:
            async for outcome in outcomes:
                if outcome.row == 10:
                    break
        run = await found.submit(double, [1, 2], concurrency=1)
        assert (await run.submitted(), (await run.wait()).done) == (2, 2)
        assert [o.result async for o in run.results()] == [2, 4]
        left = await found.submit(double, range(10, 6010))
    assert cluster.run(left.id).submitted() == 6000
