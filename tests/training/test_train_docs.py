"""What docs/train.md, docs/rl.md, docs/recipe.md and README.md show can be pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomlkit
from rollout.config.load import load_settings
from rollout.workloads.infer.config import InferConfig
from rollout.workloads.serve.config import ServeConfig
from rollout.workloads.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / page).read_text() for page in ("docs/train.md", "docs/rl.md", "README.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)] + [
    block for page in PAGES for block in re.findall(r"<<'END'\n(\[.*?)^END$", page, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_configuration_in_the_docs_is_valid(block: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(block)
    load_settings(TrainConfig if "[algorithm" in block else InferConfig, tmp_path / "c.toml", environ={})


@pytest.mark.parametrize("name", ["sft.toml", "grpo.toml", "serve.toml"])
def test_the_numbers_for_gpus_fit_the_files_of_the_recipe(name: str, tmp_path: Path) -> None:
    changes: list[tuple[str, str, str]] = re.findall(
        rf"^`{name}` \| `(.*)` \| `(.*)` \| `(.*)`$", (ROOT / "docs" / "recipe.md").read_text(), re.MULTILINE
    )
    assert changes
    for column in (1, 2):
        values = tomlkit.parse((ROOT / "docs" / "examples" / "recipe" / name).read_text())
        for change in changes:
            *sections, key = change[0].split(".")
            found = values
            for section in sections:
                found = found[section]
            value = tomlkit.value(change[column])
            assert column == 2 or found.get(key, value) == value, change
            found[key] = value
        (tmp_path / name).write_text(tomlkit.dumps(values))
        load_settings(ServeConfig if name == "serve.toml" else TrainConfig, tmp_path / name, environ={})


def test_every_link_of_the_docs_of_training_leads_somewhere() -> None:
    for name in ("train.md", "rl.md", "recipe.md", "determinism.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "docs" / name).read_text()):
            assert (ROOT / "docs" / target).exists(), f"{name}: {target}"


def test_every_code_of_a_training_error_is_explained() -> None:
    worker = ROOT / "worker" / "rollout_worker"
    sources = [
        *worker.glob("executors/train*.py"),
        *worker.glob("backends/training/*.py"),
        *worker.glob("algorithms/*.py"),
    ]
    codes = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text())}
    page = (ROOT / "docs" / "failures.md").read_text()
    assert len(codes) > 10 and {code for code in codes if f"`{code}`" not in page} == set()
