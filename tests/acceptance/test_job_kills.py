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
from job_kills import CHILD, EXECUTE, PHASES, QUICK, TEARDOWN, VERIFY, VICTIMS, WORKER, Scene
from job_rig import PROVIDERS

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
