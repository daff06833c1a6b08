"""The tasks that come with the package, and jobs that go on: the rewards that are known, from `rollout job run`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from acceptance_cli import Cli, until
from job_rig import PROVIDERS, counts, job_result, outcomes, sandbox_processes, trials, write_job, write_task
from rollout.workloads.job import datasets

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

BUNDLED = Path(datasets.__file__).with_name("bundled")
NOP = {"convert-dates": 0.2, "mend-the-median": 0.25, "several-rewards": 0.5}
"""Of an agent that does nothing, where it is not 0."""
BOTH = [{"name": "oracle"}, {"name": "nop"}]
CAFE = {
    "task.toml": 'version = "1.0"\ndialect = "rollout"\n[environment]\ncpus = "0.5"\nmemory = "256M"\nstorage = "100M"\n',
    "instruction.md": "Triez `/app/la carte.txt` par prix croissant et écrivez le résultat dans `/app/carte triée.txt`.\n",
    "environment/Dockerfile": 'FROM python:3.12-slim\nWORKDIR /app\nCOPY ["la carte.txt", "/app/la carte.txt"]\n',
    "environment/la carte.txt": "Thé à la menthe 2.80\n☕ du jour 2.10\nChocolat « Viennois » 4.50\n",
    "solution/solve.sh": "awk '{print $NF \"\\t\" $0}' '/app/la carte.txt' | sort -n | cut -f 2- > '/app/carte triée.txt'\n",
    "tests/test.sh": """
expected=$'☕ du jour 2.10\\nThé à la menthe 2.80\\nChocolat « Viennois » 4.50'
if [ "$(cat '/app/carte triée.txt')" = "$expected" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
}
"""Of a task whose name, files and words are not ASCII."""


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_oracle_and_an_agent_that_does_nothing(cli: Cli, provider: str) -> None:
    if provider == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    for name, text in CAFE.items():
        path = cli.directory / "menu" / "trier le café ☕" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    job = write_job(
        cli,
        environment={"type": provider},
        agents=BOTH,
        datasets=[{"path": "bundled:rollout"}, {"path": "bundled:harbor"}, {"path": "menu"}],
        n_concurrent_trials=4,
    )
    done = cli.run("job", "run", job, timeout=120)
    assert done.code == 0, done
    expected: dict[str, tuple[float | None, str | None]] = {}
    for task in (*BUNDLED.glob("*/*"), *cli.directory.glob("menu/*")):
        place = f"{task.parent.name}/{task.name}"
        expected |= {f"{place}/oracle/1": (1.0, None), f"{place}/nop/1": (NOP.get(task.name, 0.0), None)}
    directory = cli.directory / "jobs" / "job"
    found = dict(trials(directory))
    assert {name: trial.outcome for name, trial in found.items()} == expected, "\n".join(
        f"{name}: {trial}" for name, trial in found.items() if trial.outcome != expected.get(name)
    )
    result = job_result(directory)
    assert counts(directory) == {"total": len(expected), "completed": len(expected), "failed": 0, "skipped": 0}
    assert [(name, agent["pass_rate"]) for name, agent in result["agents"].items()] == [("oracle", 1.0), ("nop", 0.0)]
    assert result["agents"]["nop"]["mean_reward"] == pytest.approx(sum(NOP.values()) / (len(expected) / 2))
    assert not sandbox_processes(cli)


CLOCK, SEVERAL = "against-the-clock", "several-rewards"
HALF = """
mkdir -p /app/sums
for n in 0 1 2 3; do sha256sum < /app/parts/part-$n | cut -d ' ' -f 1 > /app/sums/part-$n; done
sleep 600
"""


def begun(job: Path) -> dict[str, str]:
    """When each trial began: one that ran again began anew."""
    return {name: trial.result["timestamps"]["started_at"] for name, trial in trials(job)}


@pytest.mark.slow
def test_a_job_that_is_given_more_runs_that_alone(cli: Cli) -> None:
    for task in (CLOCK, SEVERAL):
        shutil.copytree(BUNDLED / "harbor" / task, cli.directory / "tasks" / task)
    keys: dict[str, Any] = {"datasets": [{"path": "tasks"}], "agents": [{"name": "oracle"}]}
    directory = cli.directory / "jobs" / "job"

    def ran() -> dict[str, str]:
        done = cli.run("job", "run", write_job(cli, **keys), timeout=120)
        assert done.code == 0, done
        return begun(directory)

    first = ran()
    assert sorted(first) == [f"tasks/{CLOCK}/oracle/1", f"tasks/{SEVERAL}/oracle/1"]
    assert ran() == first
    # Attempts and an agent, who runs out of time with four of ten parts done, and with nothing done at the other.
    keys["n_attempts"] = 2
    keys["agents"] = [{"name": "oracle"}, {"name": "half", "execute": HALF, "override_timeout_sec": 1}]
    more = ran()
    assert {name: more[name] for name in first} == first
    assert outcomes(directory) == {
        **{f"tasks/{task}/oracle/{n}": (1.0, None) for task in (CLOCK, SEVERAL) for n in (1, 2)},
        **{f"tasks/{CLOCK}/half/{n}": (0.4, "agent_execution_timeout") for n in (1, 2)},
        **{f"tasks/{SEVERAL}/half/{n}": (0.5, "agent_execution_timeout") for n in (1, 2)},
    }
    assert counts(directory) == {"total": 8, "completed": 8, "failed": 0, "skipped": 0}
    # A task that changed runs anew, and what it came to before is kept.
    test = cli.directory / "tasks" / SEVERAL / "tests" / "test.sh"
    test.write_text(test.read_text() + "echo 0.125 > /logs/verifier/reward.txt; rm /logs/verifier/reward.json\n")
    changed = ran()
    assert {name: changed[name] for name in more if CLOCK in name} == {n: t for n, t in more.items() if CLOCK in n}
    rewards = {
        name: reward for name, (reward, _) in outcomes(directory).items() if SEVERAL in name and "before" not in name
    }
    assert rewards == {f"tasks/{SEVERAL}/{agent}/{n}": 0.125 for agent in ("oracle", "half") for n in (1, 2)}
    kept = sorted(directory.glob(f"tasks/{SEVERAL}/*/*.before-*"))
    assert [path.name[:9] for path in kept] == ["1.before-", "2.before-"] * 2
    assert [json.loads((path / "result.json").read_text())["reward"] for path in kept] == [0.5, 0.5, 1.0, 1.0]
    assert counts(directory) == {"total": 8, "completed": 8, "failed": 0, "skipped": 0}


def test_an_interrupted_job_goes_on_where_it_stopped(cli: Cli) -> None:
    """The first Ctrl-C lets what runs end, the second does not; the same command then runs what is missing."""
    gate = cli.directory / "gate"
    gate.mkdir()
    for name in ("a", "b", "c", "d"):
        wait = f"touch /gate/{name}.reached; while [ ! -e /gate/{name}.go ]; do sleep 0.05; done"
        write_task(cli.directory / "tasks" / name, wait)
    mounts = [{"type": "bind", "source": str(gate), "target": "/gate"}]
    job = write_job(cli, environment={"mounts": mounts}, datasets=[{"path": "tasks"}], n_concurrent_trials=2)
    directory = cli.directory / "jobs" / "job"

    def reached(name: str) -> bool:
        return (gate / f"{name}.reached").exists()

    (gate / "a.go").touch()
    process = cli.start("job", "run", job)
    until(lambda: reached("b") and reached("c"), "two trials to run")
    until(lambda: bool(begun(directory)), "the first result")
    process.send_signal(signal.SIGINT)
    (gate / "b.go").touch()
    (gate / "c.go").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert f"rollout job run {job}" in out + err, (out, err)
    first = begun(directory)
    assert sorted(first) == [f"tasks/{name}/script/1" for name in ("a", "b", "c")], (first, out, err)
    assert not reached("d")
    assert job_result(directory)["cancelled"] is True
    assert counts(directory) == {"total": 4, "completed": 3, "failed": 0, "skipped": 1}
    process = cli.start("job", "run", job, "--json")
    until(lambda: reached("d"), "the last trial")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert any(json.loads(line).get("event") == "finishing" for line in process.stdout)
    process.send_signal(signal.SIGINT)  # two signals at once would be one
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    until(lambda: not sandbox_processes(cli), "what was abandoned to end", timeout=15)
    assert begun(directory) == first
    (gate / "d.go").touch()
    done = cli.run("job", "run", job)
    assert done.code == 0, done
    last = begun(directory)
    assert {name: last[name] for name in first} == first
    assert set(outcomes(directory).values()) == {(1.0, None)}
    assert job_result(directory)["cancelled"] is False
    assert counts(directory) == {"total": 4, "completed": 4, "failed": 0, "skipped": 0}


def test_one_ctrl_c_does_not_wait_for_trials_that_wait_for_their_service(cli: Cli) -> None:
    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(429)
            self.send_header("Retry-After", "50")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        agent = {"name": "shell-loop", "model_name": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1"}
        write_task(cli.directory / "tasks" / "t")
        job = write_job(cli, agents=[agent], datasets=[{"path": "tasks"}])
        process = cli.start("job", "run", job, "--json")
        assert process.stdout is not None
        for line in process.stdout:
            if any(one["phase"].startswith("waiting 50 s") for one in json.loads(line).get("trials_running", ())):
                break
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 130
        assert time.monotonic() - began < 40  # and not the 200 s that four tries take
        server.shutdown()
