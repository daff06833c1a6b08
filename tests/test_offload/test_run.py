"""`pytest_runner.py run` behind its host: the outcomes of plain pytest, and tests that end their process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rollout.workloads.test.cases import OUTPUT_MAX, Outcome
from rollout_worker.testing import host
from test_offload.suites import environment, ids_of, in_bubblewrap, run, write

STYLES = {
    "test_styles.py": '''
"""
>>> 1 + 1
2
>>> 1 + 1
3
"""
import os, sys, unittest, asyncio, warnings
import pytest

count = 0

@pytest.fixture(scope="session")
def session(): yield os.getpid()

@pytest.fixture(scope="module")
def module(session):
    global count
    count += 1
    yield count

@pytest.fixture
def broken(): raise ValueError("broken")

@pytest.fixture
def breaks():
    yield
    raise ValueError("breaks")

@pytest.mark.parametrize("value", ["a b", "x::y", "[z]", "ü", "new\\nline", "-k", "$(id)", "", None, 1.5])
def test_odd(value, module): assert module

def test_shared_1(module): os.environ["SHARED"] = "1"
def test_shared_2(module): assert os.environ.pop("SHARED") == "1"
def test_fails(): assert [1, 2] == [1, 3]
def test_broken(broken): pass
def test_breaks(breaks): pass
def test_both(breaks): assert 0
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
def test_skips(): pytest.skip("inside")
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass
@pytest.mark.xfail(run=False)
def test_not_run(): os._exit(1)
def test_capsys(capsys):
    print("out")
    assert capsys.readouterr().out == "out\\n"
def test_capfd(capfd):
    os.write(1, b"out")
    assert capfd.readouterr().out == "out"
def test_warns(): warnings.warn("careful")
@pytest.mark.filterwarnings("error")
def test_warns_too(): warnings.warn("careful")
def test_exits(): sys.exit(3)
def test_reads():
    with pytest.raises(OSError): input()

class TestState:
    value = 0
    @classmethod
    def setup_class(cls): cls.value = 1
    def test_one(self): TestState.value += 1
    def test_two(self): assert self.value == 2

class TestUnit(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.made = 1
    def test_unit(self): self.assertEqual(self.made, 1)
    def test_fails(self): self.assertEqual(self.made, 2)
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i): self.assertNotEqual(i, 1)
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.skip("no")
    def test_skip(self): pass

class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_async(self): await asyncio.sleep(0)
''',
    "package/__init__.py": "",
    "package/conftest.py": "import pytest\n@pytest.fixture(scope='package')\ndef of_package(): return 7\n",
    "package/test_inner.py": "def test_inner(of_package): assert of_package == 7\n",
    "package/test_async.py": "import pytest\n@pytest.mark.asyncio\nasync def test_async(): pass\n",
    "tests/conftest.py": """
import os, pytest
@pytest.fixture
def of_directory(): return 1
@pytest.fixture(autouse=True)
def always(monkeypatch): monkeypatch.setenv("ALWAYS", "1")
""",
    "tests/test_patches.py": """
import json, os, time, pytest
def test_conftest_that_is_loaded_at_the_start(of_directory): assert os.environ["ALWAYS"] == "1"
def test_long(): raise ValueError("x" * 70000)
def test_long_skip(): pytest.skip("y" * 70000)
def test_getpid(monkeypatch): monkeypatch.setattr(os, "getpid", lambda: 1)
class TestPatched:
    @pytest.fixture(autouse=True, scope="class")
    def patched(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "dumps", lambda *_, **__: "{}")
            patch.setattr(time, "time", lambda: "now")
            yield
    def test_first(self): pass
    def test_second(self): pass
""",
    "pytest.ini": "[pytest]\naddopts = --doctest-modules -x --maxfail=1 -p pytest_asyncio.plugin\n",
}
PLAIN = """
import json, pytest
found = {}
def pytest_runtest_logreport(report):
    category = found["config"].hook.pytest_report_teststatus(report=report, config=found["config"])[0]
    if category in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        found.setdefault(report.nodeid, []).append(category)
def pytest_configure(config): found["config"] = config
def pytest_sessionfinish():
    del found["config"]
    open("plain.json", "w").write(json.dumps(found))
"""


@pytest.mark.parametrize("batches", [1, 3])
async def test_outcomes_are_those_of_plain_pytest(tmp_path: Path, batches: int) -> None:
    root = write(tmp_path, STYLES)
    write(tmp_path, {"../plain_outcomes.py": PLAIN})
    command = [sys.executable, "-m", "pytest", "-p", "plain_outcomes", "--maxfail=1000", "-q"]
    subprocess.run(command, cwd=root, env=environment(root) | {"PYTHONPATH": str(root.parent)}, capture_output=True)
    plain = json.loads((root / "plain.json").read_text())
    expected = {
        one: next((bad for bad in ("failed", "error", "xfailed", "xpassed", "skipped") if bad in seen), "passed")
        for one, seen in plain.items()
    }
    ids = ids_of(root)
    # Tests that share something are in one batch, as a schedule has them.
    whole = [one for one in ids if "TestState" not in one and "shared" not in one] if batches > 1 else ids
    tries = await run(root, whole, batches=batches)
    assert set(expected) == set(ids) and len(ids) == 45
    assert {one: made.outcome.value for one, made in tries.items()} == {one: expected[one] for one in whole}


async def test_what_is_told_of_a_test(tmp_path: Path) -> None:
    text = """
import logging, os, sys, pytest
def test_prints():
    print("from python"); print("to stderr", file=sys.stderr); sys.stdout.flush()
    os.write(1, b"from the process\\n")
    os.system("echo from a child")
def test_quiet(): pass
def test_logs():
    logging.getLogger("x").warning("logged")
    assert 0, "why"
def test_much():
    for _ in range(100): sys.stdout.write("x" * 1_000_000)
    print("end")
@pytest.mark.skip(reason="not now")
def test_skip(): pass
@pytest.fixture(scope="session")
def session():
    yield
    raise ValueError("at the end")
def test_session(session): pass
"""
    root = write(tmp_path, {"test_a.py": text})
    tries = await run(root, ids_of(root), batches=2)
    tests = {one.partition("::")[2]: made for one, made in tries.items()}
    prints = tests["test_prints"]
    assert prints.stdout == "from python\nfrom the process\nfrom a child\n" and prints.stderr == "to stderr\n"
    assert (tests["test_quiet"].stdout, tests["test_quiet"].stderr) == ("", "")
    logs = tests["test_logs"]
    assert (
        logs.message == "AssertionError: why"
        and "logged" in logs.details
        and logs.details.startswith("    def ")
        and "assert 0" in logs.details
    )
    much = tests["test_much"].stdout
    assert len(much) < OUTPUT_MAX + 100 and much.endswith("xend\n") and "left out" in much
    assert tests["test_skip"].message == "not now" and tests["test_skip"].phase == "setup"
    assert tries["(session)"].message == "ValueError: at the end"


async def test_a_failing_end_of_a_session_is_an_error_of_the_last_test(tmp_path: Path) -> None:
    text = """
import pytest
@pytest.fixture(scope="session")
def session():
    yield
    raise ValueError("at the end")
def test_first(session): pass
def test_second(session): pass
def test_third(): pass
def test_wrong(session): assert 0, "why"
"""
    root = write(tmp_path, {"test_a.py": text})
    tries = await run(root, ids_of(root), batches=2, last=True)
    assert len({made.process for one, made in tries.items() if one in ids_of(root)}) == 1
    ends = {one.partition("::test_")[2]: (made.outcome, made.phase) for one, made in tries.items()}
    assert ends == {
        "first": (Outcome.PASSED, ""),
        "second": (Outcome.PASSED, ""),
        "third": (Outcome.ERROR, "teardown"),
        "wrong": (Outcome.FAILED, "call"),
    }
    assert "ValueError: at the end" in tries["test_a.py::test_third"].message
    assert "in session" in tries["test_a.py::test_third"].details
    wrong = tries["test_a.py::test_wrong"]
    assert wrong.message == "AssertionError: why" and "ValueError: at the end" in wrong.details


@pytest.mark.parametrize(("end", "words"), [("os._exit(5)", "exit code 5"), ("time.sleep(100)", "after 2 s")])
async def test_the_end_of_a_session_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, words: str
) -> None:
    monkeypatch.setattr(host, "CLOSE_S", 2.0)
    fixture = f"@pytest.fixture(scope='session')\ndef session():\n    yield\n    {end}\n"
    text = f"import os, pytest, time\n{fixture}def test_a(session): pass\n"
    tries = await run(write(tmp_path, {"test_a.py": text}), ["test_a.py::test_a"], limit_s=1.0, last=True)
    assert tries["test_a.py::test_a"].outcome is Outcome.ERROR and words in tries["test_a.py::test_a"].message


async def test_what_stops_pytest_is_no_timeout_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CLOSE_S", 2.0)
    files = {
        "test_a.py": "def test_a(): raise KeyboardInterrupt\n",
        "conftest.py": "import time\ndef pytest_sessionfinish(): time.sleep(100)\n",
    }
    tries = await run(write(tmp_path, files), ["test_a.py::test_a"], limit_s=1.0)
    made = tries["test_a.py::test_a"]
    assert made.outcome is Outcome.CRASHED and "KeyboardInterrupt" in made.message


async def test_a_session_that_skips_at_its_end_ends_well(tmp_path: Path) -> None:
    fixture = "@pytest.fixture(scope='session')\ndef session():\n    yield\n    pytest.skip('enough')\n"
    text = f"import pytest\n{fixture}def test_a(session): pass\n"
    tries = await run(write(tmp_path, {"test_a.py": text}), ["test_a.py::test_a"], last=True)
    assert tries["test_a.py::test_a"].outcome is Outcome.PASSED


async def test_tests_that_are_not_there_any_more_are_errors(tmp_path: Path) -> None:
    root = write(tmp_path, {"test_a.py": "def test_a(): pass\n", "test_broken.py": "import not_there\n"})
    ids = ["test_a.py::test_gone", "test_a.py::test_a", "test_broken.py::test_b", "nowhere.py::test_c"]
    tries = await run(root, ids)
    assert {one: (made.outcome, made.phase) for one, made in tries.items()} == {
        "test_a.py::test_gone": (Outcome.ERROR, "collect"),
        "test_a.py::test_a": (Outcome.PASSED, ""),
        "test_broken.py::test_b": (Outcome.ERROR, "collect"),
        "nowhere.py::test_c": (Outcome.ERROR, "collect"),
    }
    assert tries["test_broken.py::test_b"].message == "ModuleNotFoundError: No module named 'not_there'"


async def test_without_a_process_every_test_is_an_error_in_its_words(tmp_path: Path) -> None:
    root = write(tmp_path, {"test_a.py": "def test_a(): pass\n", "pytest.ini": "[pytest]\naddopts = --no-such\n"})
    tries = await run(root, ["test_a.py::test_a"])
    assert tries["test_a.py::test_a"].outcome is Outcome.ERROR and "--no-such" in tries["test_a.py::test_a"].details


HOSTILE = """
import os, pytest, signal, subprocess, sys, threading, time
directory = os.getcwd()
def test_exit(): print("last words"); os._exit(0)
def test_kill(): os.kill(os.getpid(), signal.SIGKILL)
def test_group(): os.killpg(0, signal.SIGKILL)
def test_segfault(): os.kill(os.getpid(), signal.SIGSEGV)
def test_hang(): print("before"); time.sleep(1000)
def test_descriptors(): os.closerange(0, 2000)
def test_streams(): os.close(1); os.close(2); sys.stdout.close()
def test_prints(): print("printed")
def test_directory(tmp_path): os.chdir(tmp_path)
def test_gone(tmp_path): (tmp_path / "x").mkdir(); os.chdir(tmp_path / "x"); os.rmdir(tmp_path / "x")
def test_there(): assert os.getcwd() == directory
def test_signals():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(1)
def test_quiet(): time.sleep(1.2); assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
def test_thread(): threading.Thread(target=time.sleep, args=(1000,)).start()
def test_child(): subprocess.Popen(["sleep", "1234"])
def test_daemon(): subprocess.run("setsid sleep 1235 & exit", shell=True)
def test_fork():
    if os.fork() == 0: return
def test_fork_exits():
    if os.fork() == 0: sys.exit(1)
def test_interrupt(): raise KeyboardInterrupt
def test_stop(): pytest.exit("all")
def test_nonblocking(): os.set_blocking(1, False); print("x" * 10)
def test_last():
    commands = [os.popen(f"ps -o args= -p {pid}").read() for pid in os.listdir("/proc") if pid.isdigit()]
    assert not any("sleep 1235" in command for command in commands)
"""
CRASHES = {"exit", "kill", "group", "segfault", "descriptors", "interrupt", "stop"}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_hostile_test_costs_only_itself(tmp_path: Path) -> None:
    files = {
        "test_a.py": HOSTILE,
        "test_import.py": "import os\ndef test_x(): pass\nif os.path.exists('collected'): os._exit(3)\n",
        "conftest.py": "def pytest_unconfigure(config):\n    if config.option.collectonly: open('collected', 'w').close()\n",
    }
    root = write(tmp_path, files)
    tries = {one.partition("::test_")[2]: made for one, made in in_bubblewrap(root, 8.0, 1).items()}
    outcomes = {one: made.outcome for one, made in tries.items()}
    crashed = dict.fromkeys([*CRASHES, "x"], Outcome.CRASHED)
    assert outcomes == dict.fromkeys(outcomes, Outcome.PASSED) | crashed | {"hang": Outcome.TIMEOUT}
    assert "exit code 0" in tries["exit"].message and tries["exit"].stdout == "last words\n"
    assert "SIGSEGV" in tries["segfault"].message and "in test_segfault" in tries["segfault"].details
    assert tries["hang"].stdout == "before\n" and "in test_hang" in tries["hang"].details
    assert "descriptors" in tries["descriptors"].message and "all" in tries["stop"].message
    assert tries["prints"].stdout == "printed\n" and "sleep 1234" in tries["child"].message
    assert tries["x"].phase == "collect"
