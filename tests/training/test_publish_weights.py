"""Versions of a policy: what training changes, as files with the changed tensors alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from rollout.model.errors import AttemptError
from rollout.workloads.train.base_config import LoraSection
from rollout.workloads.train.rollouts import WeightsManifest
from rollout_worker.backends.training.models import with_adapter
from rollout_worker.backends.training.publish import publish, published_tensors
from safetensors import safe_open
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.engine


def model_of(directory: Path) -> Any:
    models: Any = AutoModelForCausalLM
    return models.from_pretrained(directory, dtype=torch.float32)


def file_names(directory: Path) -> set[str]:
    opened: Any = safe_open(directory / "model.safetensors", framework="pt")
    with opened as file:
        return set(file.keys())


def loaded(path: Path) -> dict[str, torch.Tensor]:
    library: Any = safetensors.torch
    return library.load_file(path)


def test_a_file_has_what_changed(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.arange(6.0).reshape(2, 3), "scalar": torch.tensor(2.0)}
    first = publish(tensors, {}, tmp_path / "0", torch.bfloat16)
    assert first.written == ["a", "b", "scalar"]
    assert first.hashes["b"] == blake3(torch.ones(3).bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()
    publish(dict(reversed(tensors.items())), {}, tmp_path / "again", torch.bfloat16)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "0").read_bytes()
    # A change that the published type does not show is none.
    second = publish(
        tensors | {"a": tensors["a"] + 1, "b": tensors["b"] + 1e-6}, first.hashes, tmp_path / "1", torch.bfloat16
    )
    assert second.written == ["a"] and list(loaded(tmp_path / "1")) == ["a"]
    third = publish(tensors | {"a": tensors["a"] + 1}, second.hashes, tmp_path / "2", torch.bfloat16)
    assert third.written == [] and not (tmp_path / "2").exists()

    manifest = WeightsManifest(-1, {}).followed_by(0, first.hashes, first.written, "file0")
    manifest = manifest.followed_by(1, second.hashes, second.written, "file1").followed_by(2, third.hashes, [], "")
    assert {name: file for name, (file, _) in manifest.tensors.items()} == {
        "a": "file1",
        "b": "file0",
        "scalar": "file0",
    }
    assert manifest.hashes == third.hashes and WeightsManifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_a_whole_model_is_published_under_the_names_of_its_files(name: str, request: pytest.FixtureRequest) -> None:
    directory = cast(Path, request.getfixturevalue(name))
    model = model_of(directory)
    assert published_tensors(model).keys() == file_names(directory)
    model.model.norm.weight.requires_grad_(False)
    assert published_tensors(model).keys() == file_names(directory) - {"model.norm.weight"}
    assert published_tensors(model, keep=False) == {}


def test_of_an_adapter_the_merged_layers_are_published(tiny: Path) -> None:
    model = with_adapter(model_of(tiny), LoraSection(r=4, target_modules=["q_proj", "embed_tokens"]), "language_model")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    merged = published_tensors(model)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert merged.keys() == {"model.embed_tokens.weight"} | {
        f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1)
    }
    whole = model.merge_and_unload().state_dict()
    for key, tensor in merged.items():
        torch.testing.assert_close(tensor, whole[key])
    fresh = model_of(tiny)
    fresh.load_state_dict(merged, strict=False)
    ids = torch.tensor([[70, 71, 72]])
    torch.testing.assert_close(fresh(ids).logits, model(ids).logits)


def test_an_adapter_on_tied_embeddings_is_refused(tied: Path) -> None:
    model = with_adapter(model_of(tied), LoraSection(r=4, target_modules=["embed_tokens"]), "language_model")
    with pytest.raises(AttemptError) as error:
        published_tensors(model)
    assert error.value.error_code == "bad_run_config"
