"""Which published weights stay in the store for the groups of a segment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from policy_rig import Place
from rollout.model.item import ItemSpec, Key, NewItem
from rollout.workloads.train.policy_config import GrpoSection
from rollout.workloads.train.prompts import Prompt, Prompts
from rollout.workloads.train.rollouts import Group, GroupResult, Sample, WeightsManifest
from rollout_worker.executors.port import Attempt, Context, Run
from rollout_worker.executors.train_rollouts import Rollouts

STEPS = 4


async def answer(item: NewItem, ordinal: int, place: Place) -> bytes:
    """Weights of an open group are there, all of them."""
    group = Group.decode(cast(bytes, item.payload))
    manifest = WeightsManifest.decode((place.directory / group.weights.manifest).read_bytes())
    assert all((place.directory / file).exists() for file in manifest.files)
    sample = Sample([5], [-0.5], "stop", 0, "5", [[group.weights.version, 1]])
    return GroupResult([sample] * len(group.seeds), [[1.0] * len(group.seeds)]).encode()


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_weights_are_let_go_once_no_group_needs_them(tmp_path: Path, lag: int) -> None:
    """Tensor `a` changes in each step, `b` in the first alone."""
    settings = GrpoSection.model_validate(
        {"base_model": "m", "dataset": "d", "prompts_per_step": 2, "num_generations": 2, "lag": lag,
         "budget": {"max_steps": STEPS}, "reward": ["rewards:exact"], "max_completion_length": 4, "max_length": 8,
         "optimizer": {"lr": 1e-3}}
    )  # fmt: skip
    Prompts.save((Prompt(n, [n], str(n), {}) for n in range(8)), tmp_path / "prompts")
    (store := tmp_path / "store").mkdir()
    config: dict[str, Any] = {"run": {"max_worker_lost": 1}, "generation": {}}
    attempt = Attempt(Key(1, 1), 1, b"p" * 32, b"", ItemSpec(), Run("01J", "train", config))
    place, prompts = Place(store, answer), Prompts(tmp_path / "prompts")
    rollouts = Rollouts(config, settings, attempt, cast(Context, place), prompts, None, tmp_path, STEPS, [])
    counts: list[int] = []
    for step in range(STEPS):
        (tmp_path / "weights").write_bytes(b"%d" % step)
        written = ["a"] if step else ["a", "b"]
        wants = {"hashes": {"a": str(step), "b": "0"}, "written": written, "path": str(tmp_path / "weights")}
        await rollouts.serve({"step": step, **wants})
        counts.append(len(list(store.iterdir())))
    # A manifest and the file of `a` of each version that a group may need, and the file of `b`, which is that of `a` too
    # in the first version. Once nothing is spawned, what is needed no longer goes with the segment's result.
    assert counts == {0: [2, 3, 3, 3], 1: [2, 4, 5, 7], 2: [2, 4, 6, 8]}[lag]
