"""The configuration of training: faults with their places, and what a user of TRL pastes."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from located import places
from rollout.config.environment import section_of
from rollout.config.load import load_settings, located
from rollout.model.errors import ConfigError, InputError, RolloutError
from rollout.workloads.port import InputReader, check_only
from rollout.workloads.resume import describe_changes
from rollout.workloads.train import preview as previewing
from rollout.workloads.train import workload as training
from rollout.workloads.train.aliases import KEYS
from rollout.workloads.train.config import SECTIONS, Kind, TrainConfig
from rollout.workloads.train.workload import Train

HEAD = '[algorithm]\nkind = "{kind}"\n[algorithm.{kind}]\n'
REST = 'base_model = "tiny"\ndataset = "rows.jsonl"\noptimizer.lr = 1e-3\nbudget.max_steps = 60\n'
TAIL = '[output]\ndir = "out"\n'


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.chdir(tmp_path)


def load(section: str, kind: Kind = "sft", tail: str = TAIL) -> TrainConfig:
    Path("c.toml").write_text(HEAD.format(kind=kind) + section + tail)
    return load_settings(TrainConfig, "c.toml", environ={})


def faults(section: str, kind: Kind = "sft", tail: str = TAIL) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(section, kind, tail)
    lines = error.value.message.split("\n")
    return [line.strip() for line in (lines[1:] if lines[0].endswith("problems:") else lines)]


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("sft", "optimizer.weight_decay = -1", "optimizer.weight_decay: must be at least 0"),
        ("sft", 'optimizer.schedule = "cosin"', 'not "cosin"; did you mean "cosine"?'),
        ("sft", "optimizer.betas = [0.9, 1.5]", "optimizer.betas: each must be at least 0 and below 1"),
        ("sft", "optimizer.warmup_steps = 61", "optimizer.warmup_steps: is 61, more than all 60 steps of the run"),
        ("sft", "optimizer.warmup_ratio = 1.5", "optimizer.warmup_ratio: must be less than 1"),
        ("sft", 'optimizer.warmup_steps = 2\noptimizer.schedule = "constant"', "optimizer.warmup_steps: has no meaning with"),
        ("sft", 'optimizer.warmup_ratio = 0.1\noptimizer.schedule = "constant"', "optimizer.warmup_ratio: has no meaning"),
        ("sft", "optimizer.min_lr_ratio = 0.1", 'min_lr_ratio: has no meaning with schedule = "linear": remove it'),
        ("sft", "optimizer.momentum = 0.9", 'optimizer.momentum: has no meaning with kind = "adamw": remove it'),
        ("sft", "minibatch_sizes = 4", 'minibatch_sizes: unknown key; did you mean "minibatch_size"?'),
        ("sft", "budget.epochs = 2", "budget: give max_steps or epochs, one of them"),
        ("sft", "max_length = 1", "max_length: must be at least 2, not 1"),
        ("sft", "devices = 2", 'devices: devices = 2 and strategy = "single" do not fit'),
        ("sft", 'compile = true\ndevices = 2\nstrategy = "fsdp"', 'compile: does not go together with strategy = "fsdp"'),
        ("sft", 'rows.too_long = "cut"', 'rows.too_long: must be "error", "drop" or "keep", not "cut"'),
        ("sft", 'rows.too_longs = "drop"', 'rows.too_longs: unknown key; did you mean "too_long"?'),
        ("sft", 'eval_dataset = { path = "e.jsonl", split = "test" }', "eval_dataset.split: is of kind"),
        ("sft", 'eval_dataset = { path = [] }', "eval_dataset.path: must not be empty"),
        ("sft", "beta = 0.1", "beta: unknown key"),
        ("sft", "learning_rates = 0.1", 'learning_rates: unknown key; did you mean "learning_rate"?'),
        ("sft", "eval.patience = 3", "eval: has no meaning without eval_dataset"),
        ("dpo", "label_smoothing = 0.5", "label_smoothing: must be less than 0.5"),
        ("dpo", 'label_smoothing = 0.1\nloss_type = "hinge"', 'label_smoothing: has no meaning with loss_type = "hinge"'),
        ("kto", "minibatch_size = 1", "minibatch_size: makes steps of one row, which has no other to compare with"),
        ("rm", 'head = "bradley"', 'head: must be "bradley_terry" or "pairwise_logistic", not "bradley"'),
    ],
)  # fmt: skip
def test_a_fault_is_told_at_its_line(kind: Kind, line: str, message: str) -> None:
    found = faults(line + "\n" + REST, kind)
    assert len(found) == 1 and message in found[0]
    assert found[0].startswith(("c.toml:4: ", "c.toml:7: ")), "its own line, or that of the table it would be in"


def test_lengths_that_disagree() -> None:
    (said,) = faults(REST + 'max_length = 64\npacking = { kind = "best_fit", max_seq_len = 32 }\n')
    assert places(said) == ["c.toml:9: algorithm.sft.packing.max_seq_len"] and "max_length is 64" in said
    packed = load(REST + 'max_length = 64\npacking.kind = "best_fit"\n').algorithm.sft
    assert packed is not None and packed.length == 64


@pytest.mark.parametrize(
    "section", ['packing = { kind = "best_fit", max_seq_len = 32 }', 'packing.kind = "best_fit"', ""]
)
def test_a_worker_reads_what_was_written_out(section: str) -> None:
    read = load(REST + section + "\n").algorithm.settings
    assert SECTIONS["sft"].model_validate(read.model_dump(mode="json")) == read


def test_all_faults_at_once() -> None:
    said = faults(
        "optimizer.lr = 0\nlearning_rat = 1\nminibatch_size = 0\n" + REST.replace("optimizer.lr = 1e-3\n", "")
    )
    assert [line.partition(" ")[0] for line in said] == ["c.toml:4:", "c.toml:5:", "c.toml:6:"]


def test_a_section_of_another_algorithm() -> None:
    (said,) = faults(REST, tail="[algorithm.dpo]\n" + REST + TAIL)
    assert places(said) == ["c.toml:8: algorithm.dpo"]


def test_names_of_trl_outside_of_the_algorithms_section() -> None:
    Path("c.toml").write_text(
        "bf16 = true\n[algorithm]\nmax_length = 9\nlearning_rate = 1\nkind = 'sft'\n[algorithm.sft]\n" + REST + TAIL
    )
    with pytest.raises(ConfigError) as error:
        load_settings(TrainConfig, "c.toml", environ={})
    said = [line.strip().partition(", such")[0] for line in error.value.message.split("\n")[1:]]
    told = "is one of TRL's names, which stand in [algorithm.KIND]"
    assert (said[0], said[2]) == (f"c.toml:1: bf16: {told}", f"c.toml:4: algorithm.learning_rate: {told}")
    assert said[1].startswith("c.toml:3: algorithm.max_length: unknown key")


def test_a_dataset_is_known_by_its_name() -> None:
    for path, kind in (("a.jsonl", "jsonl_path"), ("a.parquet", "parquet_path"), ("d/*.parquet", "parquet_path")):
        assert load(REST.replace("rows.jsonl", path)).algorithm.settings.dataset.kind == kind


# ---- what the files say


def written(section: str, tail: str = TAIL) -> TrainConfig:
    """With files that fit."""
    Path("rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n' * 4)
    Path("tiny").mkdir(exist_ok=True)
    Path("tiny/config.json").write_text('{"vocab_size": 3}')
    if not Path("tiny/tokenizer.json").exists():
        Path("tiny/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 2}}, "added_tokens": []}')
    return load(section, tail=tail)


def check(section: str) -> str:
    """What is wrong, told with its place."""
    settings = written(section)
    with pytest.raises(RolloutError) as error, located(Path("c.toml"), TrainConfig):
        check_only(Train(), settings)
    assert isinstance(error.value, ConfigError | InputError)
    return error.value.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("minibatch_size = 2\ngradient_accumulation = 3", "minibatch_size: a step takes 6 rows (2 x 3 of"),
        ("per_device_train_batch_size = 5", "4: algorithm.sft.per_device_train_batch_size: a step takes 5 rows (5 x 1 of"),
        ('base_model.chat_template = "chatmll"', 'base_model.chat_template: chatmll cannot be read (No such file or directory); did'),
        ('chat_template_path = "x.jinja"', "4: algorithm.sft.chat_template_path: x.jinja cannot be read"),
        ('base_model.tokenizer = "./none"', "4: algorithm.sft.base_model.tokenizer: there is no directory ./none"),
        ('base_model.tokenizer = "empty"', "base_model.tokenizer: empty has no tokenizer (such as tokenizer.json)"),
        ('base_model.tokenizer = "large"', "the tokenizer has 10 tokens and the model only 3 embeddings"),
        ('eval_dataset = "none.jsonl"', "4: algorithm.sft.eval_dataset.path: no file matches 'none.jsonl'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_files(line: str, message: str) -> None:
    Path("empty").mkdir()
    Path("large").mkdir()
    Path("large/tokenizer.json").write_text(
        '{"model": {"vocab": [["a", 0.0], ["b", 1.0]]}, "added_tokens": [{"id": 9}]}'
    )
    rest = REST.replace('base_model = "tiny"', 'base_model.uri = "tiny"')
    sized = rest if "batch_size" in line else rest + "minibatch_size = 2\n"
    said = check(
        line + "\n" + sized.replace("minibatch_size = 2\n", "" if "minibatch_size" in line else "minibatch_size = 2\n")
    )
    assert message in said and said.startswith("c.toml:")


def test_a_fraction_of_an_epoch_without_a_row() -> None:
    said = check(REST.replace("budget.max_steps = 60", "num_train_epochs = 0.1") + "minibatch_size = 2\n")
    assert places(said) == ["c.toml:7: algorithm.sft.num_train_epochs"]


def test_a_warm_up_longer_than_its_epochs() -> None:
    said = check(REST.replace("budget.max_steps = 60", "budget.epochs = 2\nwarmup_steps = 5") + "minibatch_size = 2\n")
    assert places(said) == ["c.toml:8: algorithm.sft.warmup_steps"] and "4 steps" in said


def test_a_model_without_a_tokenizer_and_rows_with_faults_together() -> None:
    Path("tiny").mkdir()
    Path("tiny/tokenizer.json").write_text("{}")
    said = check('eval_dataset = "bad.jsonl"\nminibatch_size = 2\n' + REST.replace('"tiny"', '"./none"'))
    assert said.startswith("2 problems:\n  c.toml:6: algorithm.sft.base_model.uri: there is no directory ./none")


# ---- a client that has none of training's packages


LIBRARIES = ("numpy", "torch", "transformers", "safetensors", "pyarrow", "datasets", "matplotlib", "peft", "accelerate")
WITHOUT = f"""
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {LIBRARIES!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from importlib.util import find_spec
from pathlib import Path
from rollout.config.environment import section_of
from rollout.config.load import load_settings, located
from rollout.workloads.port import InputReader
from rollout.workloads.train.config import TrainConfig
from rollout.workloads.train.workload import Train
settings, workload = load_settings(TrainConfig, "c.toml", {{}}), Train()
checked = workload.check(settings, InputReader(exclude=Path("out"), index=Path("index")))
print(len(list(workload.plan(checked, checked.config, 0))))
checked.close()
"""


@pytest.mark.parametrize(
    ("output", "base", "more", "fault"),
    [
        ("out", "x/model", "", ""),
        ("x", "y", "", ""),
        ("x", "x/model", "", "c.toml:12: output.model: the trained model goes to x/model, and the base model is there"),
        ("to-x", "x/model", "", "c.toml:12: output.model: the trained model goes to to-x/model, and the base model"),
        ("x", "to-x/model/deeper", "", "c.toml:12: output.model: the trained model goes to x/model, and the base"),
        ("x", "y", 'base_model.tokenizer = "x/model"', "goes to x/model, and the tokenizer is there, x/model: name"),
        ("x", "y", 'reference = "x/model"', "goes to x/model, and the reference is there, x/model: name"),
        ("x", "y", 'eval_dataset = "x/model/rows.jsonl"', "goes to x/model, and the evaluation set is there, "),
        ("y", "y", "", "c.toml:11: output.dir: y: the run would write into the base model, y, "),
        ("y/run1", "y", "", "c.toml:11: output.dir: y/run1: the run would write into the base model, y, "),
    ],
)  # fmt: skip
def test_nothing_is_written_where_the_run_reads(output: str, base: str, more: str, fault: str) -> None:
    written(REST)
    for directory in ("x/model", "x/model/deeper", "y"):
        shutil.copytree("tiny", directory, dirs_exist_ok=True)
    Path("to-x").symlink_to("x")
    for rows in ("rows.jsonl", "x/model/rows.jsonl"):
        Path(rows).write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n' * 4)
    section = REST.replace('base_model = "tiny"', f'base_model.uri = "{base}"') + f"minibatch_size = 2\n{more}\n"
    settings = load(section, "dpo", f'[output]\ndir = "{output}"\nmodel = true\n')
    if not fault:
        check_only(Train(), settings).close()
        return
    with pytest.raises(InputError) as error, located(Path("c.toml"), TrainConfig):
        check_only(Train(), settings)
    assert fault in error.value.message and "problems" not in error.value.message


def test_a_client_needs_none_of_the_libraries_to_check_and_submit() -> None:
    written(REST + "minibatch_size = 2\n")
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2\n", done.stderr


def test_a_dry_run_says_what_it_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = written(REST + "minibatch_size = 2\n")
    monkeypatch.setattr(previewing, "find_spec", lambda name: None)
    workload = Train()
    checked = check_only(workload, settings)
    found = workload.dry_run(settings, checked)
    assert found["data"] == {} and found["parameters"] is None and found["rows"] == 4
    tokens, memory = found["unknown"]
    assert "transformers: pip install" in tokens and memory == (
        "parameters and memory are not known: tiny has no safetensors files"
    )
    assert {tokens, memory} < set(workload.describe(settings, checked))
    assert not Path("out").exists()


COUNTED = {"rows": 4, "kept": 4, "dropped": 0, "truncated": 0, "tokens": 40, "supervised_tokens": 8, "longest": 12,
           "sequences": 2, "faults": {}}  # fmt: skip


def test_steps_of_a_dry_run_are_of_the_sequences_that_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = 'minibatch_size = 1\npacking.kind = "best_fit"\n' + REST.replace("max_steps = 60", "epochs = 3")
    settings, workload = written(packed, "[snapshots]\nevery_steps = 4\n" + TAIL), Train()
    monkeypatch.setattr(previewing, "find_spec", lambda name: None)
    unknown = workload.describe(settings, check_only(workload, settings))
    assert unknown[1] == "4 rows; at most 12 steps of 1 sequence (1 x 1 x 1 devices)"

    def count(found: previewing.Preview, *_: Any, **more: Any) -> None:
        assert more == {"conversations": False}
        found.data = {"dataset": COUNTED}

    monkeypatch.setattr(previewing, "find_spec", lambda name: name)
    monkeypatch.setattr(previewing, "_count", count)
    checked = check_only(workload, settings)
    found = workload.dry_run(settings, checked)
    assert (found["steps"], found["segments"]) == (6, 3), "2 sequences 3 times, 4 steps a segment, and the first"
    lines = workload.describe(settings, checked)
    assert lines[1].startswith("4 rows; 6 steps of 1 sequence") and lines[2].startswith("3 segments: the first turns")


def shaped(names: dict[str, list[int]]) -> None:
    """The headers of a model's weights."""
    Path("tiny").mkdir()
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in names.items()}).encode()
    Path("tiny/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


LAYERS = {"model.embed_tokens.weight": [3, 4], "model.layers.0.self_attn.q_proj.weight": [4, 4],
          "model.layers.0.norm.weight": [4]}  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ('["nope"]', "the model has no layer 'nope': its layers are q_proj"),
        ('"q_proj"', "no name of a layer is all matched by the regular expression 'q_proj', as "),
        ('"*_proj"', "'*_proj' is no regular expression (nothing to repeat at position 0): a list names"),
    ],
)
def test_an_adapter_of_no_layer(targets: str, message: str) -> None:
    shaped(LAYERS)
    said = check(f"lora_target_modules = {targets}\nminibatch_size = 2\n" + REST)
    assert said.startswith(f"c.toml:4: algorithm.sft.lora_target_modules: {message}")


@pytest.mark.parametrize(
    "targets", ['["q_proj", "nope"]', '["self_attn.q_proj"]', '["lm_head"]', "'.*\\.q_proj'", '"all-linear"']
)
def test_an_adapter_of_some_layer(targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shaped(LAYERS)
    monkeypatch.setattr(previewing, "find_spec", lambda name: None)
    check_only(Train(), written(f"lora.target_modules = {targets}\nminibatch_size = 2\n" + REST))


def test_a_directory_that_is_not_there_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "hub")
    for uri, meant in (("tinny", "tiny"), ("words/nomodel", "words/model"), ("org/model", ""), ("words/else", "")):
        Path("words/model").mkdir(parents=True, exist_ok=True)
        Path("words/model/config.json").touch()
        settings = written("minibatch_size = 2\n" + REST.replace('"tiny"', f'"{uri}"'))
        told = (
            f"algorithm.sft.base_model.uri: there is no directory {uri} here, so it is taken as a Hugging Face name; "
            f"did you mean {meant}?"
        )
        assert list(check_only(Train(), settings).notes) == ([told] if meant else [])


def test_a_host_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_GPUS", ("none",))
    (said,) = Train().host_notes(load('device = "cuda"\n' + REST))
    assert said.startswith('warning: algorithm.sft.device = "cuda", and this host shows no GPU: ')
    monkeypatch.setattr(training, "_GPUS", ("null",))
    assert Train().host_notes(load('device = "cuda"\n' + REST)) == []
    assert Train().host_notes(load(REST)) == []


def test_what_changed_since_the_run_began_is_named_by_its_key() -> None:
    def config(section: str) -> Any:
        checked = Train().check(written(section), InputReader(exclude=Path("out"), index=Path("index")))
        checked.close()
        return checked.config

    old = config(REST + "minibatch_size = 2\n")
    Path("copy.jsonl").write_text(Path("rows.jsonl").read_text())
    new = config(REST.replace("rows.jsonl", "copy.jsonl").replace("1e-3", "2e-3") + "minibatch_size = 4\n")
    assert describe_changes(Train(), old, new) == [
        "algorithm.sft.optimizer.lr: 0.001 -> 0.002",
        "algorithm.sft.minibatch_size: 2 -> 4",
    ], "the same rows under another name are the same data"


# ---- TRL


SFT = """
model_name_or_path = "tiny"
dataset_name = "saved"
dataset_train_split = "train"
dataset_test_split = "test"
learning_rate = 2.0e-5
num_train_epochs = 1
packing = true
packing_strategy = "bfd"
per_device_train_batch_size = 2
gradient_accumulation_steps = 8
gradient_checkpointing = true
eos_token = ""
eval_strategy = "steps"
eval_steps = 100
logging_steps = 10
report_to = "trackio"
output_dir = "Qwen2.5-SFT"
push_to_hub = false
use_peft = true
lora_r = 32
lora_alpha = 16
lora_target_modules = ["q_proj"]
bf16 = true
completion_only_loss = true
max_length = 2048
lr_scheduler_type = "cosine"
warmup_steps = 0.03
optim = "adamw_torch_fused"
adam_beta2 = 0.95
seed = 42
save_steps = 200
save_total_limit = 2
dataset_num_proc = 8
attn_implementation = "sdpa"
run_name = "first"
max_steps = -1
"""
DPO = """
model_name_or_path = "tiny"
dataset_name = "pairs.jsonl"
learning_rate = 5.0e-7
num_train_epochs = 1
per_device_train_batch_size = 2
beta = 0.05
loss_type = ["sigmoid"]
label_smoothing = 0.1
max_length = 1024
disable_dropout = true
precompute_ref_log_probs = false
sync_ref_model = false
output_dir = "out"
logging_steps = 25
fp16 = false
"""
KTO = """
model_name_or_path = "tiny"
dataset_name = "rows.parquet"
per_device_train_batch_size = 4
max_steps = 20
learning_rate = 5e-7
lr_scheduler_type = "cosine_with_min_lr"
lr_scheduler_kwargs = { min_lr_rate = 0.1 }
beta = 0.1
loss_type = "kto"
desirable_weight = 1.3
undesirable_weight = 1.0
warmup_ratio = 0.1
output_dir = "out"
report_to = "none"
remove_unused_columns = false
"""
REWARD = """
model_name_or_path = "tiny"
dataset_name = "pairs.jsonl"
learning_rate = 1e-4
num_train_epochs = 1
per_device_train_batch_size = 8
center_rewards_coefficient = 0.01
max_length = 2048
lora_task_type = "SEQ_CLS"
use_peft = false
lora_r = 16
output_dir = "out"
"""


def settings(section: str, kind: Kind) -> dict[str, Any]:
    loaded = load(section, kind, tail="")
    return loaded.model_dump(exclude_unset=True) | {"notes": loaded.notes}


def test_a_configuration_of_trl_sft() -> None:
    found = settings(SFT, "sft")
    saved = {"kind": "dataset_path", "path": "saved"}
    assert found["algorithm"]["sft"] == {
        "base_model": {"uri": "tiny"},
        "dataset": {**saved, "split": "train"},
        "eval_dataset": {**saved, "split": "test"},
        "optimizer": {
            "lr": 2e-5, "schedule": "cosine", "warmup_ratio": 0.03, "kind": "adamw", "betas": (0.9, 0.95),
        },
        "budget": {"epochs": 1}, "packing": {"kind": "best_fit"}, "minibatch_size": 2, "gradient_accumulation": 8,
        "gradient_checkpointing": True, "eval": {"every_steps": 100}, "precision": "bf16", "attention": "sdpa",
        "lora": {"r": 32, "alpha": 16, "target_modules": ["q_proj"]}, "loss_on": {"kind": "completion_only"},
        "max_length": 2048, "seed": 42,
    }  # fmt: skip
    assert found["output"] == {"dir": "Qwen2.5-SFT"} and found["run"] == {"name": "first"}
    assert found["snapshots"] == {"every_steps": 200, "keep_last": 2}
    assert [note.partition(" ")[0] for note in found["notes"]] == ["logging_steps", "report_to", "dataset_num_proc"]


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("dpo", DPO, {"beta": 0.05, "loss_type": "sigmoid", "label_smoothing": 0.1, "disable_dropout": True}),
        (
            "kto",
            KTO,
            {
                "dataset": {"kind": "parquet_path", "path": "rows.parquet"},
                "optimizer": {"lr": 5e-7, "schedule": "cosine_with_min_lr", "min_lr_ratio": 0.1, "warmup_ratio": 0.1},
                "desirable_weight": 1.3,
            },
        ),
        ("rm", REWARD, {"centre": 0.01, "dataset": {"path": "pairs.jsonl"}, "optimizer": {"lr": 1e-4}}),
    ],
)
def test_configurations_of_its_other_trainers(kind: Kind, given: str, expected: dict[str, Any]) -> None:
    found = settings(given, kind)["algorithm"][kind]
    assert {key: found[key] for key in expected} == expected and "lora" not in found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fp16 = true", 'fp16: is not done here: use precision = "bf16"'),
        ('deepspeed = "z3.json"', 'deepspeed: is not done here: set strategy = "fsdp"'),
        ("load_in_4bit = true", "load_in_4bit: is not done here"),
        ("push_to_hub = true", "push_to_hub: is not done here: rollout snapshot export"),
        ('save_strategy = "epoch"', "save_strategy: is not done here: set save_steps"),
        ('eval_strategy = "epoch"', "eval_strategy: is not done here: set eval_steps"),
        ('dataset_text_field = "body"', 'dataset_text_field: is not done here: call the column "text"'),
        ('packing_strategy = "wrapped"', "packing_strategy: is not done here: rows are packed by best fit"),
        ("max_prompt_length = 512", "max_prompt_length: is not done here: prompt and answer have max_length together"),
        ("rpo_alpha = 1.0", "rpo_alpha: is not done here: one loss is trained on"),
        ("eval_on_start = true", "eval_on_start: is not done here: the first evaluation is after eval.every_steps"),
        ("activation_checkpointing = true\ngradient_checkpointing = false", "is TRL's name of gradient_checkpointing"),
        ('loss_type = "dft"', "loss_type: is not done here: sft has one loss"),
        ('optim = "adafactor"', 'optim: must be "adamw", "adam" or "sgd", not "adafactor"'),
        ("gradient_accumulation_steps = 0", "gradient_accumulation_steps: must be at least 1, not 0"),
        ("adam_beta2 = 2.0", "adam_beta2: each must be at least 0 and below 1"),
        ("max_steps = 3", "max_steps: is TRL's name of budget.max_steps, which is given too: keep one of them"),
        ('dataset_name = "x"', "dataset_name: is TRL's name of dataset.path, which is given too"),
        ("lr_scheduler_kwargs = { power = 2 }", "lr_scheduler_kwargs: only min_lr_rate is known"),
    ],
)  # fmt: skip
def test_what_is_refused_of_trl_has_its_line_and_what_to_do(line: str, message: str) -> None:
    (said,) = faults(line + "\n" + REST)
    assert said.startswith("c.toml:4: algorithm.sft.") and message in said


def test_older_keys_of_dpo() -> None:
    read = load("reference_free = true\nlabel_pad_token_id = -100\npadding_value = 0\n" + REST, "dpo")
    assert read.algorithm.dpo is not None and read.algorithm.dpo.reference == "free"
    assert [note.partition(" ")[0] for note in read.notes] == ["label_pad_token_id", "padding_value"]


def test_the_valid_keys_are_listed_once() -> None:
    said = faults("abc = 1\ndef = 2\nghi = 3\n" + REST)
    assert "abc: unknown key; valid keys are base_model, " in said[0]
    assert [line.rpartition(": ")[2] for line in said[1:]] == ["unknown key", "unknown key"]


def test_ipo_is_an_algorithm() -> None:
    (said,) = faults('loss_type = ["ipo"]\n' + REST, "dpo")
    assert 'set algorithm.kind = "ipo"' in said


def test_every_key_of_trl_is_known() -> None:
    """What TRL's users set beside the arguments of transformers, but for what nobody sets by hand."""
    ours = set[str]().union(*(section.model_fields for section in SECTIONS.values()))
    for name in ("sft_config", "dpo_config", "kto_config", "reward_config", "grpo_config", "model_config"):
        own = fields(f"trainer/{name}.py") - _RARE
        assert len(own) > 10 and own - KEYS.keys() - ours - {"loss_type"} == set(), name


def fields(path: str) -> set[str]:
    """Of the dataclass in a file of TRL, which takes seconds to import."""
    found = find_spec("trl")
    assert found is not None and found.origin is not None
    tree = ast.parse((Path(found.origin).parent / path).read_text("utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        line.target.id
        for line in classes[-1].body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


_RARE = {"bnb_4bit_quant_storage", "bnb_4bit_quant_type", "use_bnb_nested_quant"}


def test_every_target_is_a_key_of_ours() -> None:
    for name, key in KEYS.items():
        assert bool(key.place) + bool(key.note or key.instead) >= 1, name
        if not key.place:
            continue
        tables = [TrainConfig] if key.place.startswith("/") else list(SECTIONS.values())
        parts = key.place.removeprefix("/").split(".")
        assert any(_has(table, parts) for table in tables), f"{name}: {key.place}"


def _has(model: Any, parts: list[str]) -> bool:
    for i, part in enumerate(parts):
        field = model.model_fields.get(part)
        if field is None:
            return False
        model = section_of(field.annotation)
        if model is None:
            return i == len(parts) - 1
    return True
