"""What a snapshot holds is what a workspace is made again from."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rollout.workloads.experiment.contracts import WORKSPACE, TrialInput
from rollout_worker.sandboxes.errors import SandboxRefusedError
from rollout_worker.sandboxes.port import Limits, Sandbox, Spec
from rollout_worker.sandboxes.process import open_process
from rollout_worker.trials.blobs import Blobs
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.masking import Masks
from rollout_worker.trials.workspace import Workspace

GIVEN = {
    "schedule_index": 0,
    "ids": {"run_id": "r", "trial_id": "trial_000001", "variant_id": "a", "task_id": "t", "repl_idx": 0},
    "task": {},
    "policy": {"timeout_ms": 1, "sandbox": {"mode": "process"}},
}


def grow(rng: random.Random, directory: Path, depth: int = 0) -> None:
    """A few names, so that two trees have the same ones for entries of other kinds."""
    directory.mkdir()
    for name in ("a", "b", "c d", "-e", "node_modules"):
        path, kind = directory / name, rng.randrange(5)
        if kind == 0 and depth < 2:
            grow(rng, path, depth + 1)
        elif kind == 1:
            path.symlink_to(rng.choice(("a", "b", "nowhere")))
        elif kind < 4:
            path.write_bytes(rng.randbytes(rng.randrange(4)))
            path.chmod(rng.choice((0o644, 0o755, 0o600)))


async def put(sandbox: Sandbox, directory: Path) -> None:
    (await sandbox.exec(f"rm -rf {WORKSPACE}; mkdir -p {WORKSPACE}")).check()
    await sandbox.upload(directory, WORKSPACE)


async def test_a_restored_workspace_is_the_one_that_was_left(tmp_path: Path) -> None:
    files = tmp_path / "scratch" / "files"
    files.mkdir(parents=True)
    masks = Masks()
    blobs = Blobs(files, tmp_path / "scratch" / "blobs", masks)
    workspace = Workspace(Contracted(TrialInput.of(GIVEN), files), blobs, masks)
    spec = Spec(directories=("/agentlab",), limits=Limits(0.1, 128, 128, 64))
    async with open_process(tmp_path / "state") as provider:
        try:
            sandbox = await provider.create(spec)
        except SandboxRefusedError as error:
            pytest.skip(str(error))
        for seed in range(12):
            rng = random.Random(seed)
            for name in ("left", "own"):
                grow(rng, tmp_path / f"{name}-{seed}")
            await put(sandbox, tmp_path / f"left-{seed}")
            left = await workspace.snapshot(sandbox)
            await put(sandbox, tmp_path / f"own-{seed}")
            own = await workspace.snapshot(sandbox)
            assert left is not None and own is not None
            await workspace.restore(sandbox, own, left, None)
            restored = await workspace.snapshot(sandbox)
            assert restored is not None
            assert workspace.snapshots[restored].entries == workspace.snapshots[left].entries
    assert workspace.remarks == []
