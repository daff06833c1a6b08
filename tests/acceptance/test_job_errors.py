"""Every type of error of the format, made for real: tiny tasks, agents and sandboxes that fail in one way each."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster, free_port
from job_rig import DOCKERFILE, REWARD_1, SMALL, job_result, trials, write_job, write_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")

HERE = Path(__file__).parent
ROLLOUT = 'version = "1.0"\ndialect = "rollout"\n[environment]\ncpus = "0.25"\nmemory = "256M"\nstorage = "100M"\n'


@dataclass(frozen=True)
class Way:
    """To fail: what the task is like, and the reward that counts all the same."""

    agent: str = "true"
    test: str = REWARD_1
    toml: str = SMALL
    dockerfile: str | None = DOCKERFILE
    install: str | None = None
    reward: float | None = None
    says: str = ""
    """What the message of the error must hold."""
    files: dict[str, str] = field(default_factory=dict[str, str])


def fault(name: str) -> str:
    """A task for `faulty_sandboxes`."""
    return f'{SMALL}env = {{ FAULT = "{name}" }}\n'


WAYS: dict[str, Way] = {
    "environment_build_failed": Way(dockerfile=DOCKERFILE + "RUN echo no compiler >&2; exit 3\n", says="no compiler"),
    "environment_build_timeout": Way(
        dockerfile=DOCKERFILE + "RUN sleep 600\n", toml=SMALL + "build_timeout_sec = 1\n", says="build_timeout_sec"
    ),
    "environment_start_failed": Way(
        toml='[agent]\nnetwork_mode = "no-network"\n' + SMALL + 'network_mode = "public"\n', says="network"
    ),
    "environment_resource_allocation_failed": Way(toml=SMALL.replace("0.25", "60000"), says="60000"),
    "environment_healthcheck_failed": Way(
        toml=SMALL + '[environment.healthcheck]\ncommand = "echo not yet; exit 1"\ninterval_sec = 0.05\nretries = 2\n',
        says="not yet",
    ),
    "environment_lost": Way(agent="echo lost now", toml=fault("lost")),
    "environment_teardown_failed": Way(toml=fault("destroy"), reward=1.0),
    "internal_error": Way(toml=fault("create"), says="nobody thought of"),
    "agent_install_failed": Way(install="echo no such package; exit 9", says="9"),
    "agent_install_timeout": Way(install="sleep 600", toml="[agent]\ninstall_timeout_sec = 1\n" + SMALL, says="1"),
    "agent_execution_failed": Way(agent="exit 5", test="echo 0.5 > /logs/verifier/reward.txt", reward=0.5, says="5"),
    "agent_execution_timeout": Way(
        agent="echo begun > /app/begun; sleep 600",
        test="[ -e /app/begun ] && echo 0.5 > /logs/verifier/reward.txt",
        toml="[agent]\ntimeout_sec = 1\n" + SMALL,
        reward=0.5,
        says="1",
    ),
    "verifier_tests_copy_failed": Way(toml=fault("tests"), says="No space left"),
    "verifier_failed": Way(test=REWARD_1 + "; exit 3", toml=ROLLOUT, reward=0.0, says="3"),
    "verifier_timeout": Way(
        test=REWARD_1 + "; sleep 600", toml="[verifier]\ntimeout_sec = 1\n" + SMALL, reward=0.0, says="1"
    ),
    "verifier_reward_missing": Way(test="true", reward=0.0, says="reward.txt"),
    "verifier_reward_invalid": Way(test="echo nan > /logs/verifier/reward.txt", reward=0.0, says="nan"),
}
"""By type. Others are made in the tests below (`environment_image_pull_failed`, `task_not_found`), in
tests/contract/test_trials.py (`task_invalid`, `environment_out_of_memory`, `cancelled`) and, for what services of models
answer (`api_...`, `agent_...`), in tests/core/test_agents.py."""

REWARDS = {
    "negative": ("echo -3.5 > /logs/verifier/reward.txt", -3.5, None),
    "huge": ("echo 1e300 > /logs/verifier/reward.txt", 1e300, None),
    "beyond": ("echo 1e400 > /logs/verifier/reward.txt", 0.0, "verifier_reward_invalid"),
    "text": ("echo passed > /logs/verifier/reward.txt", 0.0, "verifier_reward_invalid"),
    "empty": (": > /logs/verifier/reward.txt", 0.0, "verifier_reward_invalid"),
    "nan-in-json": ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json", 0.0, "verifier_reward_invalid"),
    "pipe": ("mkfifo /logs/verifier/reward.txt", 0.0, "verifier_reward_invalid"),
    "directory": ("mkdir /logs/verifier/reward.json", 0.0, "verifier_reward_invalid"),
    "link-out": ("ln -s /etc/hostname /logs/verifier/reward.txt", 0.0, "verifier_reward_invalid"),
    "too-large": ("head -c 3000000 /dev/zero > /logs/verifier/reward.txt", 0.0, "verifier_reward_invalid"),
}
"""(what the verifier leaves, the reward, the type of error)"""


def test_every_way_to_fail_has_its_type(cli: Cli) -> None:
    for name, way in WAYS.items():
        files = {"environment__install_sh": way.install} if way.install else {}
        write_task(cli.directory / "ways" / name, way.agent, way.test, way.toml, dockerfile=way.dockerfile, **files)
    for name, (test, _, _) in REWARDS.items():
        write_task(cli.directory / "rewards" / name, "true", test)
    job = write_job(
        cli,
        environment={"type": "faulty_sandboxes:FaultyProvider", "provider_config": {"image": "host"}},
        datasets=[{"path": "ways"}, {"path": "rewards"}],
        n_concurrent_trials=8,
    )
    cli.env["PYTHONPATH"] = str(HERE)
    done = cli.run("job", "run", job, timeout=120)
    assert done.code == 0, done
    found = {name.split("/")[1]: trial for name, trial in trials(cli.directory / "jobs" / "job")}
    expected = {name: (way.reward, name) for name, way in WAYS.items()}
    expected |= {name: (reward, error) for name, (_, reward, error) in REWARDS.items()}
    wrong = [f"{n}: expected {expected[n]}\n{t}" for n, t in found.items() if t.outcome != expected[n]]
    assert not wrong, "\n\n".join(wrong)
    assert found.keys() == expected.keys()
    for name, way in WAYS.items():
        message = found[name].result["error"]["message"]
        assert way.says in message, (name, message)
        assert message.strip() in found[name].text("error.txt"), (name, found[name].text("error.txt"))
    result = job_result(cli.directory / "jobs" / "job")
    valid = [reward for reward, _ in expected.values() if reward is not None]
    assert (result["completed_trials"], result["failed_trials"]) == (len(valid), len(expected) - len(valid))


@pytest.mark.skipif(not all(map(shutil.which, ("bwrap", "skopeo", "umoci"))), reason="they are not installed")
def test_an_image_that_does_not_exist(cli: Cli) -> None:
    image = f"127.0.0.1:{free_port()}/there/is:none"
    write_task(cli.directory / "tasks" / "pull", toml=f'{SMALL}docker_image = "{image}"\n', dockerfile=None)
    environment = {"type": "bubblewrap", "provider_config": {"image": "pull"}}
    done = cli.run("job", "run", write_job(cli, environment=environment, datasets=[{"path": "tasks"}]))
    assert done.code == 0, done
    ((_, trial),) = trials(cli.directory / "jobs" / "job")
    assert trial.outcome == (None, "environment_image_pull_failed"), trial
    assert image.partition("/")[0] in trial.result["error"]["message"]


def test_a_task_whose_files_were_lost(cli: Cli, tmp_path: Path) -> None:
    """From the object store, between the command and the worker. The other task runs."""
    write_task(cli.directory / "tasks" / "lost", "true # a lost one")
    write_task(cli.directory / "tasks" / "there", "true")
    with Cluster(tmp_path / "nodes") as cluster:
        coordinator = cluster.add_coordinator()
        coordinator.wait_event("coordinator_ready")
        process = cli.start("job", "run", write_job(cli, datasets=[{"path": "tasks"}]), *cluster.operator())
        shown = ["run", "show", "job", "--json", *cluster.operator()]
        until(lambda: '"sealed": true' in cli.run(*shown).out or process.poll() is not None, "the job to be submitted")
        store = coordinator.directory / "data" / "object-store"
        (lost,) = [path for path in store.rglob("*") if is_of(path, b"a lost one")]
        lost.unlink()
        cluster.add_worker()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (out, err)
    assert {n: t.outcome for n, t in trials(cli.directory / "jobs" / "job")} == {
        "tasks/lost/script/1": (None, "task_not_found"),
        "tasks/there/script/1": (1.0, None),
    }


def is_of(path: Path, word: bytes) -> bool:
    return path.is_file() and word in path.read_bytes()
