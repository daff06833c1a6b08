"""Workers, the processes that run trials, and coordinators that are killed: each trial is counted once, nothing stays.

In the normal lane a phase or two; `make test-slow` strikes everyone in every phase.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
from acceptance_cli import Cli, until
from cluster import Cluster
from job_kills import CHILD, EXECUTE, PHASES, QUICK, REAPED_S, TEARDOWN, VERIFY, VICTIMS, WORKER, Scene
from job_rig import PROVIDERS, counts, outcomes, sandbox_processes, write_job, write_task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("kills")
    directory = root / "user"
    directory.mkdir()
    cli = Cli(directory, {name: str(root / name) for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")})
    with Cluster(root / "nodes", transport=QUICK) as cluster:
        cluster.add_coordinator().wait_event("coordinator_ready")
        for _ in range(2):
            cluster.add_worker().wait_event("worker_ready")
        yield Scene(cluster, cli)
    until(lambda: not cli.left_behind(), "every process to end")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_worker_that_is_killed_while_agents_work(scene: Scene) -> None:
    scene.strike(WORKER, EXECUTE, "bubblewrap")


def test_the_process_of_the_trials_that_is_killed_in_verification(scene: Scene) -> None:
    scene.strike(CHILD, VERIFY, "process")


@pytest.mark.slow
def test_a_command_that_is_killed_with_its_private_cluster_goes_on(cli: Cli) -> None:
    gate = cli.directory / "gate"
    gate.mkdir()
    write_task(cli.directory / "tasks" / "a", "true")
    write_task(cli.directory / "tasks" / "b", "touch /gate/reached; while [ ! -e /gate/go ]; do sleep 0.02; done")
    mounts = [{"type": "bind", "source": str(gate), "target": "/gate"}]
    job = write_job(cli, environment={"mounts": mounts}, datasets=[{"path": "tasks"}])
    directory = cli.directory / "jobs" / "job"
    process = cli.start("job", "run", job)
    until(lambda: (gate / "reached").exists() and len(outcomes(directory)) == 1, "one trial of two to be done")
    process.kill()
    process.communicate()
    until(lambda: not sandbox_processes(cli), "what ran in sandboxes to end", timeout=REAPED_S)
    (gate / "go").touch()
    done = cli.run("job", "run", job)
    assert done.code == 0, done
    assert outcomes(directory) == {f"tasks/{task}/script/1": (1.0, None) for task in ("a", "b")}
    assert counts(directory) == {"total": 2, "completed": 2, "failed": 0, "skipped": 0}
    until(lambda: not cli.left_behind(), "every process to end")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_everyone_in_every_phase(scene: Scene, victim: str, provider: str) -> None:
    if provider == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    for phase in PHASES:
        for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2) if phase == TEARDOWN else (0.0,):
            scene.strike(victim, phase, provider, delay_s)
    print("\n".join(scene.record))
    scene.record.clear()
