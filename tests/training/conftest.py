"""Models that the tests of training share."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from policy_tasks import Start


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollout_worker.backends.tiny import make_tiny

    directory = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose output layer is its embeddings."""
    from rollout_worker.backends.tiny import TINY, make_random

    directory = tmp_path_factory.mktemp("tied") / "model"
    make_random(directory, replace(TINY, tied=True, std=0.05), seed=1)
    return directory


@pytest.fixture(scope="session")
def dropping(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout."""
    directory = tmp_path_factory.mktemp("dropping") / "model"
    shutil.copytree(tiny, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    return directory


@pytest.fixture(scope="session")
def rewarding(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, whose head adds up."""
    import torch
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("rewarding") / "model"
    shutil.copytree(tiny, directory)
    weights = load_file(tiny / "model.safetensors")
    head = torch.ones(1, weights["model.norm.weight"].shape[0])
    save_file({**weights, "score.weight": head}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def supervised_policy(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """About half right at the task of `policy_tasks`."""
    from policy_tasks import supervised

    return supervised(tmp_path_factory.mktemp("policy"))
