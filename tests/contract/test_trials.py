"""Trials over the providers of this host: what a task, an agent and a verifier may do, and what comes of it.

An agent does what its task's instruction says, which is bash. Nothing here may write outside of a sandbox's own
directories: under `process` that would be this machine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from job_files import make_task
from rollout.model.errors import AttemptError
from rollout.workloads.job.load_task import load_task
from rollout.workloads.job.record import SERVICES_ENDED, TrialRecord
from rollout_worker.executors.port import UnsuitableError
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.local import LocalProvider
from rollout_worker.sandboxes.port import Limits, Spec
from rollout_worker.sandboxes.process import open_process
from rollout_worker.trials.environment import Images, prepare
from rollout_worker.trials.times import Times
from rollout_worker.trials.waits import Waits
from trial_rig import Rig, job, rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROVIDERS = ("process", "bubblewrap")
HELLO = '[ "$(cat hello.txt 2>/dev/null)" = hello ] && reward=1 || reward=0; echo $reward > /logs/verifier/reward.txt\n'
HALF = "echo 0.5 > /logs/verifier/reward.txt\n"
SCRIPT = {"name": "script", "execute": "bash /tmp/instruction.md", "env": {"TOKEN": "${TRIAL_TOKEN}"}}
SECRET = "a-secret-of-nobody"
ROLLOUT = 'version = "1.0"\ndialect = "rollout"\n'
SMALL = "[environment]\nmemory_mb = 256\nstorage_mb = 100\n"
ENDED, KEPT = (f"[verifier]\nkeep_processes = {keeps}\n" for keeps in ("false", "true"))
UNHEALTHY = '[environment.healthcheck]\ncommand = "exit 1"\ninterval_sec = 0.01\nretries = 2\n'


class Bench:
    """A started executor over one provider, and tasks for it."""

    def __init__(self, trials: Rig, directory: Path) -> None:
        self.trials = trials
        self._directory = directory
        self._made = 0

    def task(self, agent: str, test: str = HALF, toml: str = SMALL) -> Path:
        self._made += 1
        named = {"instruction.md": agent, "tests/test.sh": test}
        return make_task(self._directory / f"task-{self._made}", toml, files=named)

    async def trial(self, agent: str, test: str = HALF, toml: str = SMALL, **settings: Any) -> TrialRecord:
        return await self.trials.trial(self.task(agent, test, toml), **settings)

    async def error(self, agent: str, test: str = HALF, toml: str = SMALL) -> AttemptError:
        with pytest.raises(AttemptError) as raised:
            await self.trials.attempt(self.task(agent, test, toml))
        return raised.value


async def benches(provider: str) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="trials-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIAL_TOKEN", SECRET)
        directory = Path(name)
        config = job(
            provider, SCRIPT, {"name": "oracle"}, {"name": "nop"}, environment={"provider_config": {"image": "host"}}
        )
        async with rig(config, directory / "rig", make_task(directory / "first")) as trials:
            try:
                await trials.provider.probe()
            except SandboxRefusedError as error:
                pytest.skip(str(error))
            yield Bench(trials, directory)
            assert trials.boxes() == []


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PROVIDERS)
async def each(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async for bench in benches(request.param):
        yield bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async for bench in benches("bubblewrap"):
        yield bench


# What everybody may rely on


async def test_the_oracle_passes_and_nobody_fails(each: Bench) -> None:
    task = each.task("true", HELLO, ROLLOUT)
    rewards = {agent: (await each.trials.attempt(task, agent=agent)).rewards for agent in ("oracle", "nop")}
    assert rewards == {"oracle": {"reward": 1.0}, "nop": {"reward": 0.0}}


async def test_what_begins_with_this_host_is_planned_once_a_run(tmp_path: Path) -> None:
    directory = make_task(tmp_path / "task", files={"environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n"})
    environment, images = load_task(directory).task.environment, Images(tmp_path, False, {})
    async with open_process(tmp_path / "state") as provider:
        waits = Waits(Times(), lambda text: None, "")
        first = await prepare(environment, directory, provider, images, 60, waits)
        assert await prepare(environment, directory, provider, images, 60, waits) is first


async def test_a_record_says_when_and_what_and_its_files_hold_the_rest(bench: Bench) -> None:
    record = await bench.trial("echo said; echo told >&2; echo log > /logs/agent/a.log", "echo tested\n" + HALF)
    files = bench.trials.files(record)
    assert (record.result.reward, record.result.error, record.provider) == (0.5, None, "bubblewrap")
    assert record.network == "public"
    assert {name: files[name] for name in ("agent/stdout.txt", "agent/stderr.txt", "agent/a.log")} == {
        "agent/stdout.txt": "said\n",
        "agent/stderr.txt": "told\n",
        "agent/a.log": "log\n",
    }
    assert (files["verifier/stdout.txt"], files["verifier/reward.txt"]) == ("tested\n", "0.5\n")
    times = record.result.timestamps
    assert times.verifier_started_at is not None
    assert (
        times.started_at
        <= times.environment_setup_started_at
        <= times.agent_setup_started_at
        <= times.agent_execution_started_at
        <= times.verifier_started_at
        <= times.ended_at
    )
    phases = [note for note, _ in bench.trials.contexts[-1].told]
    assert phases[:4] == ["environment setup", "agent install", "agent execution", "verification"]


async def test_what_is_printed_is_shown_as_it_comes_with_whose_it_is(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    await bench.trial(r"printf 'one\ntwo \033[31mred\036 9.9.9\n'")
    lines = [line for line in capsys.readouterr().out.splitlines() if "agent]" in line]
    assert [line.partition("] ")[2] for line in lines] == ["one", "two red 9.9.9"]
    assert all(line.startswith("[d/task-") and "/script/1 agent]" in line for line in lines)


async def test_an_agent_is_told_its_deadline(bench: Bench) -> None:
    record = await bench.trial(
        "echo $((ROLLOUT_DEADLINE - $(date +%s))) $ROLLOUT_TIMEOUT_SEC", toml="[agent]\ntimeout_sec = 90\n" + SMALL
    )
    left, timeout = bench.trials.files(record)["agent/stdout.txt"].split()
    assert 80 <= int(left) <= 90
    assert timeout == "90"


async def test_secrets_are_hidden_wherever_they_are_printed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    record = await bench.trial(
        'echo $TOKEN; printf "${TOKEN%%-*}"; sleep 0.05; echo "-${TOKEN#*-}"; echo "<$TOKEN>" > /logs/agent/log; '
        "echo x > /logs/agent/of-$TOKEN; mkdir -p /logs/artifacts/$TOKEN; echo y > /logs/artifacts/$TOKEN/a; "
        'echo "it was $TOKEN" >&2; exit 1',
        "env\n" + HALF,
    )
    files = bench.trials.files(record)
    assert files["agent/stdout.txt"] == "***\n***\n"
    assert files["agent/log"] == "<***>\n"
    assert record.result.error is not None
    assert record.result.error.message.endswith("it was ***")
    assert (files["agent/of-***"], files["artifacts/logs/artifacts/***/a"]) == ("x\n", "y\n")
    assert not [name for name in files if SECRET in name]
    assert not [name for name, text in files.items() if SECRET in text]
    assert "TOKEN" not in files["verifier/stdout.txt"]
    assert SECRET not in capsys.readouterr().out


# Before verification the agent is dead, and what it planted is gone


PLANTED = {
    "a reward in json": "echo '{\"reward\": 1000}' > /logs/verifier/reward.json; chmod 444 /logs/verifier/reward.json",
    "directories for rewards": "mkdir -p /logs/verifier/reward.json/a /logs/verifier/reward.txt; chmod 0 /logs/verifier",
    "a link for the logs": "rm -rf /logs/verifier; mkdir -p x; echo 9 > x/reward.json; ln -s /app/x /logs/verifier",
    "a daemon that goes on": "(setsid sh -c 'while :; do echo 9 > /logs/verifier/reward.json; sleep 0.01; done' "
    "> /dev/null 2>&1 < /dev/null &); sleep 0.1",
    "nothing at all": "rm -rf /app /logs /tests /tmp; true",
}


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_planted_reward_is_not_read(each: Bench, planted: str) -> None:
    record = await each.trial(PLANTED[planted], f"sleep 0.1\n{HALF}", ENDED + SMALL)
    assert (record.rewards, record.result.error) == ({"reward": 0.5}, None)


async def test_the_tests_are_not_there_before_and_are_ours_then(each: Bench) -> None:
    record = await each.trial(
        "find /tests /solution -mindepth 1 > seen; echo exit 1 > /tests/test.sh; echo planted > /tests/more; "
        "(setsid sh -c 'while [ ! -e /tests/key ]; do sleep 0.01; done; cp /tests/key /app' > /dev/null 2>&1 &)",
        "sleep 0.1; [ -s seen ] || [ -e /tests/more ] || [ -e /app/key ] && exit 1; " + HALF,
        ENDED + SMALL,
    )
    assert record.rewards == {"reward": 0.5}


async def test_what_makes_clearing_impossible_is_the_agents_failure(bench: Bench) -> None:
    record = await bench.trial("echo 9 > /logs/verifier/reward.json; printf '#!/bin/sh\\n' > /usr/bin/rm")
    assert record.result.error is not None
    assert (record.result.reward, record.result.error.type) == (0.0, "agent_execution_failed")
    assert "reward.json" in record.result.error.message


async def test_a_reward_that_is_a_link_is_followed_in_the_sandbox(bench: Bench) -> None:
    record = await bench.trial("true", "echo 0.25 > /app/reward; ln -s /app/reward /logs/verifier/reward.txt")
    assert record.rewards == {"reward": 0.25}


async def test_libraries_that_every_program_would_load_are_put_back(bench: Bench) -> None:
    record = await bench.trial("echo /app/mine.so > /etc/ld.so.preload", "cat /etc/ld.so.preload; " + HALF)
    assert bench.trials.files(record)["verifier/stdout.txt"] == ""
    assert any("loads first" in remark for remark in record.remarks)


# The image's user and entrypoint, and the first line of a script


BOB = (
    "RUN mkdir /home/bob && echo bob:x:7777:7777::/home/bob:/bin/sh >> /etc/passwd && chown 7777 /home/bob\nUSER bob\n"
)
ENTRYPOINT = """RUN printf '#!/bin/sh\\nsleep 300 & echo $! > /tmp/pid; exec "$@"\\n' > /usr/bin/begin && chmod 755 /usr/bin/begin
ENTRYPOINT ["begin"]
"""
PACKAGE = """RUN mkdir -p /tmp/p/DEBIAN /tmp/p/usr/bin && echo echo packed > /tmp/p/usr/bin/packed && chmod 755 /tmp/p/usr/bin/packed
RUN printf 'Package: packed\\nVersion: 1\\nArchitecture: all\\nMaintainer: x\\nDescription: x\\n' > /tmp/p/DEBIAN/control
RUN dpkg-deb -b /tmp/p /tmp/p.deb && apt-get install -y /tmp/p.deb
"""
RUNS = "until [ -s /tmp/pid ]; do sleep 0.02; done; kill -0 $(cat /tmp/pid)"


@pytest.mark.parametrize(
    ("dockerfile", "agent", "test", "toml"),
    [
        (BOB, "id -un > /logs/agent/who; [ $HOME = /home/bob ]", '[ "$(id -un) $HOME" = "bob /home/bob" ]', ""),
        (ENTRYPOINT, RUNS, RUNS, ""),
        (ENTRYPOINT, f"{RUNS} && rm /tmp/pid", RUNS, ROLLOUT),  # everything was ended in between
        ("", "true", "#!/usr/bin/env -S python3 -u\nopen('/logs/verifier/reward.txt', 'w').write('0.5')\n", ""),
        ("", "true", "#!/bin/sh -x\ncase $- in *x*) true;; *) false;; esac", ""),
        (PACKAGE, "packed", "packed", ""),
    ],
    ids=["user", "entrypoint", "entrypoint again", "python", "an option", "apt-get install"],
)
async def test_an_image_and_its_scripts_are_as_they_say(
    bench: Bench, dockerfile: str, agent: str, test: str, toml: str
) -> None:
    if "apt-get" in dockerfile and shutil.which("apt-get") is None:
        pytest.skip("this host has no apt-get")
    test = test if "python3" in test else f"{test}\n[ $? = 0 ] || exit 1\n{HALF}"
    task = bench.task(agent, test, toml + SMALL.replace("storage_mb = 100", "storage_mb = 500"))
    (task / "environment" / "Dockerfile").write_text(f"FROM debian:12\n{dockerfile}")
    record = await bench.trials.trial(task)
    assert (record.rewards, record.result.error) == ({"reward": 0.5}, None)


# What it leaves running


SERVICE = "sleep 300 > /dev/null 2>&1 & echo $! > pid"
ASK = "kill -0 $(cat pid) && reward=1 || reward=0; echo $reward > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize(("toml", "reward"), [("", 1.0), (ENDED, 0.0), (ROLLOUT, 0.0), (ROLLOUT + KEPT, 1.0)])
async def test_a_service_lives_through_verification_where_the_task_has_it_so(
    each: Bench, toml: str, reward: float
) -> None:
    record = await each.trial(SERVICE, ASK, toml + SMALL)
    assert (record.rewards, record.result.error) == ({"reward": reward}, None)


async def test_a_service_lives_on_into_the_next_step(bench: Bench) -> None:
    files = {"steps/one/instruction.md": SERVICE, "steps/two/instruction.md": "true"}
    files |= {f"steps/{name}/tests/test.sh": ASK for name in ("one", "two")}
    toml = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n' + SMALL
    task = make_task(bench.task("").with_name("serves"), toml, without=("tests/test.sh",), files=files)
    assert [step.rewards for step in (await bench.trials.trial(task)).steps] == [{"reward": 1.0}] * 2


async def test_what_an_agent_leaves_running_cannot_stop_its_trial(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_worker.trials.trial.STUCK_S", 1.0)
    stops = "import os\\nwhile True:\\n  try: os.getppid() == 1 and os.kill(-1, 19)\\n  except OSError: pass"
    agent = f"printf '{stops}' > stops.py; setsid python3 stops.py > /dev/null 2>&1 &"
    limited = "[verifier]\ntimeout_sec = 2\n" + SMALL
    record = await bench.trial(agent, f"sleep 1; {HALF}", limited)
    assert record.result.error is not None
    assert record.result.error.type in ("agent_execution_failed", "verifier_timeout")
    assert record.result.reward == 0.0


async def test_an_oracle_whose_service_was_ended_says_so(bench: Bench) -> None:
    task = bench.task("true", ASK, ROLLOUT + SMALL)
    (task / "solution" / "solve.sh").write_text("sleep 30 > /dev/null 2>&1 &\n")
    record = await bench.trials.attempt(task, agent="oracle")
    assert [remark for remark in record.remarks if remark.startswith(f"{SERVICES_ENDED}: sleep")]


# Errors, each from its cause: (agent, test, task.toml) -> (type, reward)


ERRORS: dict[str, tuple[str, str, str, str, float | None]] = {
    "not a number": ("true", "echo nan > /logs/verifier/reward.txt", SMALL, "verifier_reward_invalid", 0.0),
    "too large": (
        "true",
        "head -c 1100000 /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt",
        SMALL,
        "verifier_reward_invalid",
        0.0,
    ),
    "a pipe": ("true", "mkfifo /logs/verifier/reward.txt", SMALL, "verifier_reward_invalid", 0.0),
    "none": ("true", "exit 3", SMALL, "verifier_reward_missing", 0.0),
    "tests that fail": ("true", f"{HALF}exit 1", ROLLOUT, "verifier_failed", 0.0),
    "tests that do not end": (
        "true",
        f"{HALF}sleep 30 & sleep 30",
        "[verifier]\ntimeout_sec = 0.3\n" + SMALL,
        "verifier_timeout",
        0.0,
    ),
    "an agent that fails": ("exit 7", HALF, SMALL, "agent_execution_failed", 0.5),
    "an agent that fails, of 000": ("exit 7", HALF, ROLLOUT, "agent_execution_failed", 0.0),
    "an agent that does not end": (
        "trap '' TERM; while :; do sleep 0.1; done",
        HALF,
        "[agent]\ntimeout_sec = 0.3\n" + SMALL,
        "agent_execution_timeout",
        0.5,
    ),
    "too much memory": ("python3 -c 'bytearray(600 << 20)'", HALF, SMALL, "environment_out_of_memory", 0.5),
    "too much memory, of 000": (
        "python3 -c 'bytearray(600 << 20)'",
        HALF,
        ROLLOUT + SMALL,
        "environment_out_of_memory",
        0.0,
    ),
    "too much storage": (
        "i=0; while head -c 20000000 /dev/zero > big$i; do i=$((i + 1)); sleep 0.3; done",
        f"head -c 1000000 /dev/zero > more && {HALF}",
        "[environment]\nmemory_mb = 256\nstorage_mb = 60\n",
        "agent_execution_failed",
        0.5,
    ),
    "work that takes all memory when it is tested": (
        "echo 'bytearray(600 << 20)' > work.py",
        f"set -e; python3 work.py; {HALF}",
        SMALL,
        "verifier_reward_missing",
        0.0,
    ),
    "work that hangs when it is tested": (
        "echo 'while True: pass' > work.py",
        f"set -e; python3 work.py; {HALF}",
        "[verifier]\ntimeout_sec = 0.5\n" + SMALL,
        "verifier_timeout",
        0.0,
    ),
    "work that kills its tests": (
        "echo 'import os; os.kill(os.getppid(), 9)' > work.py",
        f"set -e; python3 work.py; {HALF}",
        SMALL,
        "verifier_failed",
        0.0,
    ),
    "an agent that destroys its sandbox": (
        "rm -rf /usr/bin/*; exit 0",
        HALF,
        SMALL,
        "agent_execution_failed",
        0.0,
    ),
    "a user who is not there": (
        "true",
        HALF,
        f'[agent]\nuser = "nosuch"\n{SMALL}',
        "environment_start_failed",
        None,
    ),
    "two networks": (
        "true",
        HALF,
        '[agent]\nnetwork_mode = "no-network"\n' + SMALL,
        "environment_start_failed",
        None,
    ),
    "too many processors": (
        "true",
        HALF,
        "[environment]\ncpus = 4096\n",
        "environment_resource_allocation_failed",
        None,
    ),
    "a graphics card": ("true", HALF, "[environment]\ngpus = 1\n", "environment_resource_allocation_failed", None),
    "never healthy": (
        "true",
        HALF,
        UNHEALTHY,
        "environment_healthcheck_failed",
        None,
    ),
    "a Dockerfile that fails": ("true", HALF, SMALL, "environment_build_failed", None),
}


@pytest.mark.parametrize("case", ERRORS)
async def test_each_error_has_its_type_and_reward(bench: Bench, case: str) -> None:
    agent, test, toml, error, reward = ERRORS[case]
    task = bench.task(agent, test, toml)
    if case == "a Dockerfile that fails":
        (task / "environment" / "Dockerfile").write_text("FROM debian:12\nRUN exit 9\n")
    record = await bench.trials.trial(task)
    assert record.result.error is not None
    assert (record.result.error.type, record.result.reward) == (error, reward)


async def test_a_timeout_keeps_what_was_printed_until_then(bench: Bench) -> None:
    record = await bench.trial(
        "echo begun; echo log > /logs/agent/log; while :; do sleep 0.1; done",
        toml="[agent]\ntimeout_sec = 0.3\n" + SMALL,
    )
    files = bench.trials.files(record)
    assert (files["agent/stdout.txt"], files["agent/log"]) == ("begun\n", "log\n")


async def test_a_failed_try_is_evidence_and_says_whether_and_when_to_try_again(bench: Bench) -> None:
    error = await bench.error("true", toml=UNHEALTHY)
    assert (error.error_code, error.retry, error.retry_after_ms) == ("environment_healthcheck_failed", True, 1000)
    record = TrialRecord.decode(error.data)
    assert error.keeps == (bytes.fromhex(record.files or ""),)
    assert record.result.reward is None


# Long output, odd files


async def test_names_that_are_no_text_cost_nobody_the_record(bench: Bench) -> None:
    record = await bench.trial(
        r"cd /logs/agent; touch $'f\xff'; mkfifo $'p\xff'; ln -s $'/x\xff' l; cd ../artifacts; mkfifo $'p\xff'; "
        r"install -m 755 /dev/null $'f\xff'; exit 3"
    )
    assert record.result.error is not None
    assert (record.result.error.type, record.result.reward) == ("agent_execution_failed", 0.5)
    assert {r"agent/f\xff", r"artifacts/logs/artifacts/f\xff"} <= set(bench.trials.files(record))
    assert any(r"p\udcff" in remark for remark in record.remarks)


async def test_of_very_many_files_some_are_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_worker.trials.gathering.FILES_MAX", 20)
    record = await bench.trial("cd /logs/agent; touch $(seq 100); cp * /logs/artifacts")
    assert (record.result.error, record.result.reward) == (None, 0.5)
    assert "/logs/agent holds more than 20 files and directories: it was kept in part only" in record.remarks
    kept = [name for name in bench.trials.files(record) if name.startswith("agent/") and name[6:].isdigit()]
    assert 0 < len(kept) <= 20


HOSTILE = {
    "deep": 'cd /logs/DIR; python3 -c \'import os; [(os.mkdir("d"), os.chdir("d")) for _ in range(400)]\'; exit 3',
    "long": 'cd /logs/DIR; python3 -c \'import os; [(os.mkdir(200 * "d"), os.chdir(200 * "d")) for _ in range(40)]\'; '
    "exit 3",
    "two of a name": r"cd /logs/DIR; touch 'p\xff'; mkdir $'p\xff'; touch $'p\xff/f'; exit 3",
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_what_cannot_be_kept_changes_nothing_for_the_trial(bench: Bench, case: str) -> None:
    agent = HOSTILE[case]
    both = f"({agent.replace('DIR', 'agent')}); {agent.replace('DIR', 'artifacts')}"
    record = await bench.trial(both)
    assert record.result.error is not None
    assert (record.result.error.type, record.result.reward) == ("agent_execution_failed", 0.5)
    assert any("/logs/agent" in remark for remark in record.remarks)


async def test_output_and_logs_without_end_are_kept_in_part(bench: Bench) -> None:
    record = await bench.trial(
        "head -c 70000000 /dev/zero | tr '\\0' x > /logs/agent/big; echo end >> /logs/agent/big; echo s > /logs/agent/z; "
        "echo first; yes | head -c 20000000; echo last; ln -s /etc/shadow /logs/agent/l; mkfifo /logs/agent/p; "
        "echo not ours > /logs/agent/stdout.txt",
    )
    files = bench.trials.files(record)
    assert record.rewards == {"reward": 0.5}
    said = files["agent/stdout.txt"]
    assert (said[:8], said[-7:], len(said) < 6_000_000) == ("first\ny\n", "y\nlast\n", True)
    assert (files["agent/big"][-5:], len(files["agent/big"]) < 5_000_000, files["agent/z"]) == (
        "\nend\n"[1:].rjust(5, "x"),
        True,
        "s\n",
    )
    assert "agent/l" not in files
    assert any("/logs/agent/p was not kept" in remark for remark in record.remarks)


# Steps, separate verifiers, verification anew


async def test_steps_run_one_after_another_until_one_misses_its_minimum(bench: Bench) -> None:
    names = {"one": 0.5, "two": 1.0, "three": 0.6, "four": 1.0}
    files = {
        f"steps/{name}/tests/test.sh": f"cat did; echo {reward} > /logs/verifier/reward.txt\n"
        for name, reward in names.items()
    }
    agent = "echo x >> did; find /tests /logs -type f\n"
    files |= {f"steps/{name}/instruction.md": agent for name in names}
    toml = "".join(f'[[steps]]\nname = "{name}"\nmin_reward = {0.9 if name == "three" else 0.1}\n' for name in names)
    task = make_task(
        bench.task("").with_name("steps"), toml, without=("tests/test.sh", "solution/solve.sh"), files=files
    )
    record = await bench.trials.trial(task)
    assert [(step.name, step.rewards) for step in record.steps] == [
        ("one", {"reward": 0.5}),
        ("two", {"reward": 1.0}),
        ("three", {"reward": 0.6}),
    ]
    assert record.result.reward == pytest.approx(0.7)
    kept = bench.trials.files(record)
    assert kept["steps/three/verifier/stdout.txt"] == "x\nx\nx\n"
    assert kept["steps/three/agent/stdout.txt"] == ""  # no tests, and nothing of the steps before


async def test_an_agent_that_is_not_root_can_leave_logs_in_every_step(bench: Bench) -> None:
    agent = "id -un > /logs/agent/who; echo x > /logs/artifacts/x; touch /app/here"
    files = {f"steps/{name}/instruction.md": agent for name in ("one", "two")}
    steps = '[agent]\nuser = "nobody"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    without = ("tests/test.sh", "solution/solve.sh")
    files["tests/test.sh"] = "[ -O /tests ] && " + HALF
    task = make_task(bench.task("").with_name("users"), steps, without=without, files=files)
    record = await bench.trials.attempt(task)
    kept = bench.trials.files(record)
    assert (record.rewards, record.steps[1].error) == ({"reward": 0.5}, None)
    assert [kept[f"steps/{name}/agent/who"] for name in ("one", "two")] == ["nobody\n", "nobody\n"]


APART = """
artifacts = ["out", {source = "/app/notes/a.txt", destination = "kept/a.txt"}]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "cp secret-of-the-task /logs/artifacts/collected 2>/dev/null || echo collected > /logs/artifacts/collected"
"""
SEES = "find /app /logs -type f | sort; ./out/program && echo 1 > /logs/verifier/reward.txt\n"


async def test_a_separate_verifier_sees_declared_artifacts_only_and_so_does_a_later_one(bench: Bench) -> None:
    agent = (
        "mkdir out notes; printf '#!/bin/sh\\n' > out/program; chmod +x out/program; echo n > notes/a.txt; "
        "echo h > hidden; echo 9 > /logs/verifier/reward.json; (setsid sleep 60 > /dev/null 2>&1 &)"
    )
    task = bench.task(agent, SEES, APART)
    record = await bench.trials.trial(task)
    files = bench.trials.files(record)
    seen = "/app/notes/a.txt\n/app/out/program\n/logs/artifacts/collected\n"
    assert (record.rewards, files["verifier/stdout.txt"]) == ({"reward": 1.0}, seen)
    assert files["artifacts/kept/a.txt"] == "n\n"
    assert [row["source"] for row in json.loads(files["artifacts/manifest.json"])] == [
        "/logs/artifacts",
        "/app/out",
        "/app/notes/a.txt",
    ]
    (task / "tests" / "test.sh").write_text(SEES.replace("echo 1", "echo 0.25"))
    again = await bench.trials.trial(task, regrade=record.files)
    assert (again.rewards, bench.trials.files(again)["verifier/stdout.txt"]) == ({"reward": 0.25}, seen)


async def test_a_trial_without_artifacts_cannot_be_verified_anew(bench: Bench) -> None:
    task = bench.task("true")
    record = await bench.trials.trial(task)
    again = await bench.trials.trial(task, regrade=record.files)
    assert again.result.error is not None
    assert again.result.error.type == "task_invalid"
    assert "declare" in again.result.error.message


# The life of a trial


async def test_waiting_for_room_is_no_part_of_the_setup_and_is_told(bench: Bench) -> None:
    provider = bench.trials.provider
    assert isinstance(provider, LocalProvider)
    cpus = provider.capacity.cpus
    toml = f"[environment]\ncpus = {cpus}\nmemory_mb = 256\nstorage_mb = 100\nbuild_timeout_sec = 0.9\n"
    async with await provider.create(Spec(limits=Limits(cpus=cpus, memory_mb=256))):
        trial = asyncio.create_task(bench.trial("true", toml=toml))
        await bench.trials.until("waiting for room")
        granted = datetime.now(UTC) + timedelta(seconds=1)
        await asyncio.sleep(1)  # longer than its image may take
    record = await trial
    assert record.result.error is None and record.result.durations.environment_setup_sec is not None
    assert record.result.timestamps.environment_setup_started_at >= granted - timedelta(seconds=0.5)
    assert record.result.durations.total_sec >= record.result.durations.environment_setup_sec + 1
    assert [note for note, _ in bench.trials.contexts[-1].told][:4] == [
        "environment setup",
        "waiting for room",
        "environment setup",
        "agent install",
    ]
    (told,) = [remark for remark in record.remarks if "room" in remark]
    assert told.startswith(f"this host has room for 1 of these trials at once: {cpus:g} cpus")


async def test_a_trial_that_is_cancelled_leaves_nothing(each: Bench) -> None:
    attempt = asyncio.ensure_future(each.trials.attempt(each.task("echo begun; sleep 60")))
    await each.trials.until("agent execution")
    assert len(each.trials.boxes()) == 1
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert each.trials.boxes() == []


async def test_a_sandbox_that_is_lost_is_no_fault_of_the_agent(bench: Bench) -> None:
    attempt = asyncio.ensure_future(bench.trials.attempt(bench.task("touch begun; sleep 60")))
    await bench.trials.until("agent execution")
    (sandbox,) = bench.trials.sandboxes()
    os.kill(sandbox.warden_pid, signal.SIGKILL)
    with pytest.raises(AttemptError) as raised:
        await attempt
    assert (raised.value.error_code, raised.value.retry) == ("environment_lost", True)
    assert bench.trials.boxes() == []


async def test_a_worker_that_lacks_a_variable_gives_the_trial_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIAL_TOKEN")
    with pytest.raises(UnsuitableError, match="TOKEN needs TRIAL_TOKEN"):
        await bench.trials.attempt(bench.task("true"))


async def test_a_worker_that_lacks_the_provider_gives_the_trial_back(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t")
    async with rig(job("no.such:thing"), tmp_path / "rig", task) as trials:
        with pytest.raises(UnsuitableError, match=r"no\.such:thing cannot be loaded"):
            await trials.attempt(task)


async def test_a_sandbox_is_kept_for_a_person_when_its_trial_did_not_pass(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", SMALL, files={"instruction.md": "echo mine > x", "tests/test.sh": HALF})
    environment = {"preserve_env": "on_failure", "provider_config": {"image": "host"}}
    agent = {"name": "script", "execute": "bash /tmp/instruction.md"}
    async with rig(job("bubblewrap", agent, environment=environment), tmp_path / "rig", task) as trials:
        record = await trials.attempt(task)
        assert trials.boxes() == []
    assert (Path(record.preserved.partition(":")[2]) / "app" / "x").read_text() == "mine\n"


# Agents that are code


def obedient(**kwargs: Any) -> dict[str, Any]:
    return {"name": "obedient", "import_path": "trial_agents:Obedient", "kwargs": kwargs}


@pytest.fixture
async def task(tmp_path: Path) -> Path:
    return make_task(tmp_path / "t", SMALL, files={"instruction.md": "do it", "tests/test.sh": HALF})


AGENTS: dict[str, tuple[dict[str, Any], str, float | None]] = {
    "hangs": ({"hangs": True}, "agent_execution_timeout", 0.5),
    "breaks": ({"raises": "RuntimeError"}, "agent_execution_failed", 0.5),
    "refuses": ({"raises": "agent_refused"}, "agent_refused", 0.5),
    "may not ask": ({"raises": "agent_authentication_failed"}, "agent_authentication_failed", None),
    "asks what is refused after it was answered": ({"raises": "api_bad_request"}, "agent_execution_failed", 0.5),
    "unheard of": ({"raises": "of_a_later_version"}, "of_a_later_version", None),
}


@pytest.mark.parametrize("case", AGENTS)
async def test_what_agents_used_is_counted_however_they_end(task: Path, tmp_path: Path, case: str) -> None:
    kwargs, error, reward = AGENTS[case]
    config = job("process", {**obedient(**kwargs), "override_timeout_sec": 0.2})
    async with rig(config, tmp_path / "rig", task) as trials:
        record = await trials.trial(task)
    assert record.result.error is not None
    assert (record.result.error.type, record.result.reward) == (error, reward)
    usage = record.usage
    assert (usage.n_input_tokens, usage.n_output_tokens, usage.cost_usd, record.result.cost) == (100, 10, 0.25, 0.25)
    assert (record.agent_version, "counted" in record.remarks) == ("1.2", True)


async def test_a_service_that_asks_for_a_pause_holds_back_all_trials_of_its_agents(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trial_agents.Obedient.made", 0)
    limited = obedient(raises="api_rate_limited", retry_after_s=1.5, once=True)
    async with rig(job("process", limited, {"name": "nop"}), tmp_path / "rig", task) as trials:
        with pytest.raises(AttemptError) as raised:
            await trials.attempt(task)
        assert (raised.value.error_code, raised.value.retry, raised.value.retry_after_ms) == (
            "api_rate_limited",
            True,
            1500,
        )
        assert (raised.value.units_in, raised.value.units_out) == (110, 250_000)
        refused = TrialRecord.decode(raised.value.data)
        others = [await trials.attempt(task, agent="nop"), await trials.attempt(task, number=2)]
    ended = refused.result.timestamps.agent_execution_ended_at
    waited = [(one.result.timestamps.agent_execution_started_at - ended).total_seconds() for one in others]
    assert waited[0] < 1.4 <= waited[1]


async def test_an_agent_that_cannot_be_imported_is_tried_elsewhere(task: Path, tmp_path: Path) -> None:
    config = job("process", {"name": "gone", "import_path": "no_such_module:Agent"})
    async with rig(config, tmp_path / "rig", task) as trials:
        with pytest.raises(AttemptError) as raised:
            await trials.attempt(task)
    assert (raised.value.error_code, raised.value.retry) == ("agent_install_failed", True)


INSTALLS = {
    "fails": ({"install": "echo no >&2; exit 4"}, "agent_install_failed"),
    "does not end": ({"install": "sleep 60", "override_setup_timeout_sec": 0.2}, "agent_install_timeout"),
}


@pytest.mark.parametrize("case", INSTALLS)
async def test_an_agent_that_cannot_be_installed_is_tried_again(task: Path, tmp_path: Path, case: str) -> None:
    keys, error = INSTALLS[case]
    async with rig(job("process", {"name": "mine", "execute": "true", **keys}), tmp_path / "rig", task) as trials:
        with pytest.raises(AttemptError) as raised:
            await trials.attempt(task)
    assert (raised.value.error_code, raised.value.retry) == (error, True)


async def test_a_job_that_verifies_nothing_has_no_rewards(task: Path, tmp_path: Path) -> None:
    config = job("process", {"name": "mine", "execute": "exit 1"}, {"name": "nop"}, verifier={"disable": True})
    async with rig(config, tmp_path / "rig", task) as trials:
        idle = await trials.attempt(task, agent="nop")
        failed = await trials.attempt(task, agent="mine")
    assert (idle.rewards, idle.result.error, idle.result.durations.verifier_sec) == (None, None, None)
    assert failed.result.error is not None
    assert (failed.rewards, failed.result.error.type) == (None, "agent_execution_failed")
