"""What is exported of a snapshot is what was trained: transformers and peft load it and compute the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rollout.model.errors import ConfigError, NotFoundError, ObjectCorruptError
from rollout.processes.command import Finished
from rollout.snapshots.export import export_model, rename_tensors
from rollout.snapshots.tar import pack
from rollout.workloads.train.model_output import write_model
from rollout_worker.backends.tiny import make_tiny

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from rollout_worker.backends.training.merge import main as merge  # noqa: E402
from rollout_worker.backends.training.weights import names  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory)
    return directory


def snapshot(directory: Path, tiny: Path, weights: dict[str, Any], algorithm: str = "sft", **files: Any) -> Path:
    """Unpacked, as training writes it."""
    (directory / "model").mkdir(parents=True)
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, directory / "model.safetensors")
    for path in tiny.glob("*.json"):
        (directory / "model" / path.name).write_bytes(path.read_bytes())
    for name, value in files.items():
        (directory / "model" / f"{name}.json").write_text(json.dumps(value))
    manifest = {"format": 1, "kind": "train_state", "algorithm": algorithm, "data": {"pad": 3}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def adapted(model: Any, **options: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """With an adapter that does something; its weights and configuration as a snapshot has them."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", **options))
    torch.manual_seed(1)
    parameters = dict(found.named_parameters())
    weights = {file_name: parameters[name] for name, file_name in names(found).items()}
    for parameter in weights.values():
        torch.nn.init.normal_(parameter, std=0.3)
    config = found.peft_config["default"].to_dict()
    return found.eval(), weights, {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}


def test_a_language_model_loads_in_transformers(tmp_path: Path, tiny: Path) -> None:
    trained = transformers.AutoModelForCausalLM.from_pretrained(tiny).eval()
    with torch.no_grad():
        trained.lm_head.weight.mul_(2)
    export_model(snapshot(tmp_path / "state", tiny, trained.state_dict()), tmp_path / "out")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded.eval()(IDS).logits, trained(IDS).logits)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("1 and 1")["input_ids"]


def test_a_reward_model_is_a_classifier_whose_logit_is_the_score(tmp_path: Path, tiny: Path) -> None:
    backbone, head = transformers.AutoModel.from_pretrained(tiny).eval(), torch.nn.Linear(128, 1, bias=False)
    weights = {f"model.{name}": value for name, value in backbone.state_dict().items()} | {"score.weight": head.weight}
    export_model(snapshot(tmp_path / "state", tiny, weights, "rm"), tmp_path / "out")
    loader = transformers.AutoModelForSequenceClassification
    loaded, info = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    score = head(backbone(IDS).last_hidden_state[:, -1])
    padded = torch.cat([IDS, torch.full((1, 2), 3)], dim=1)  # the token that the data was padded with
    mask = (padded != 3).long()
    assert torch.allclose(loaded.eval()(padded, attention_mask=mask).logits, score, atol=1e-5)


def test_an_adapter_loads_in_peft_and_in_transformers_and_merged_it_is_a_model(tmp_path: Path, tiny: Path) -> None:
    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tiny)

    trained, weights, config = adapted(base(), task_type="CAUSAL_LM")
    expected = trained(IDS).logits
    assert (expected - base().eval()(IDS).logits).abs().max() > 0.1
    state = snapshot(tmp_path / "state", tiny, weights, adapter_config=config)
    export_model(state, tmp_path / "out", base=str(tiny))
    assert torch.equal(peft.PeftModel.from_pretrained(base(), tmp_path / "out").eval()(IDS).logits, expected)
    direct = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(direct.eval()(IDS).logits, expected)
    merge(str(tmp_path / "out"), str(tiny), str(tmp_path / "whole"))  # what --merged does in a process of its own
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert torch.allclose(whole(IDS).logits, expected, atol=1e-3)


class Store:
    """The objects of a cluster: what `fetch` finds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def put(self, state: Path) -> bytes:
        packed = pack(state, self.directory / "new")
        (self.directory / "new").rename(self.directory / packed.id.hex())
        return packed.id

    async def fetch(self, name: bytes, path: Path) -> None:
        try:
            shutil.copyfile(self.directory / name.hex(), path)
        except FileNotFoundError:
            raise NotFoundError("no such object") from None


@pytest.fixture
def on_a_snapshot(tmp_path: Path, tiny: Path) -> tuple[Store, bytes, bytes, dict[str, Any], Any]:
    """Where its snapshots are; base, adapter, configuration of the run that trained it from `run:first`, its logits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    store = Store(tmp_path / "store")
    base = store.put(snapshot(tmp_path / "base-state", tiny, model.state_dict()))
    trained, weights, config = adapted(model, task_type="CAUSAL_LM")
    config["base_model_name_or_path"] = "run:first"
    adapter = store.put(snapshot(tmp_path / "adapter-state", tiny, weights, adapter_config=config))
    run = {
        "algorithm": {"kind": "sft", "settings": {"lora": {"r": 2}}},
        "model": {"uri": "run:first", "path": None, "snapshot": base.hex()},
    }
    return store, base, adapter, run, trained(IDS).logits


async def test_an_adapter_of_a_snapshot_comes_with_its_base(tmp_path: Path, on_a_snapshot: Any) -> None:
    store, _, adapter, run, expected = on_a_snapshot
    (tmp_path / "out").mkdir()  # of an earlier command
    await write_model(store.fetch, adapter, run, tmp_path / "out", print)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "out" / "base"
    )
    for loader in (peft.AutoPeftModelForCausalLM, transformers.AutoModelForCausalLM):
        assert torch.equal(loader.from_pretrained(tmp_path / "out").eval()(IDS).logits, expected)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "base")("1 and 1")["input_ids"]


async def test_an_adapter_of_a_snapshot_is_merged_with_it(
    tmp_path: Path, on_a_snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(command: list[str], **_: Any) -> Finished:
        merge(*command[-3:])  # without a process of its own, which imports torch again
        return Finished(0, "", "")

    monkeypatch.setattr("rollout.snapshots.export.run", here)
    store, base, adapter, run, expected = on_a_snapshot
    await write_model(store.fetch, adapter, run, tmp_path / "out", print, merged=True)
    assert not (tmp_path / "out" / "base").exists() and not (tmp_path / "out" / "adapter_config.json").exists()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.allclose(whole(IDS).logits, expected, atol=1e-3)
    (store.directory / base.hex()).unlink()
    with pytest.raises(NotFoundError, match="the base of this adapter, run:first"):
        await write_model(store.fetch, adapter, run, tmp_path / "again", print)
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*"))


def test_an_adapter_of_a_reward_model_has_its_head(tmp_path: Path, tiny: Path) -> None:
    def base() -> Any:
        return transformers.AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, pad_token_id=3)

    trained, weights, config = adapted(base(), modules_to_save=["score"])
    export_model(snapshot(tmp_path / "state", tiny, weights, "rm", adapter_config=config), tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "out")
    assert torch.equal(loaded.eval()(IDS).logits, trained(IDS).logits)


def test_a_whole_model_cannot_be_merged(tmp_path: Path, tiny: Path) -> None:
    state = snapshot(tmp_path / "state", tiny, {"w": torch.ones(1)})
    with pytest.raises(ConfigError, match="whole model"):
        export_model(state, tmp_path / "out", merged=True)
    (state / "model.safetensors").unlink()
    with pytest.raises(ObjectCorruptError, match=r"lacks model\.safetensors"):
        export_model(state, tmp_path / "out")


def test_tensors_are_renamed_without_being_read(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0), "b.c": torch.ones(2, 2)}, tmp_path / "in", metadata={"format": "pt"})
    rename_tensors(tmp_path / "in", tmp_path / "out", lambda name: f"longer.{name}")
    found = load_file(tmp_path / "out")
    assert torch.equal(found["longer.a"], torch.arange(3.0)) and found["longer.b.c"].shape == (2, 2)
    (tmp_path / "in").write_bytes(b"short")
    with pytest.raises(ObjectCorruptError, match="no safetensors file"):
        rename_tensors(tmp_path / "in", tmp_path / "out", str)
