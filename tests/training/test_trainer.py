"""What each setting of training does, by the numbers of real steps."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.model.errors import AttemptError
from rollout.snapshots.export import export_model
from rollout.workloads.train import memory
from rollout.workloads.train.base_config import OptimizerSection
from rollout.workloads.train.config import SECTIONS, Kind
from rollout.workloads.train.segment import stopping_after
from rollout_worker.backends.training import models, parallel, speed, state
from rollout_worker.backends.training.collate import Collator, partner
from rollout_worker.backends.training.optimizer import make_optimizer, make_schedule
from rollout_worker.backends.training.trainer import RowTrainer
from training_jobs import Done, alike, forget_accelerator, restored, same_bytes, settings_of, tokens, train, trainer_of
from transformers import AutoModelForCausalLM, GPTJConfig

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")]

LN2 = torch.tensor(2.0).log().item()
ALL = {"minibatch_size": 9, "gradient_accumulation": 1, "budget": {"max_steps": 2}}
"""All rows in each step."""

Run = Callable[..., Done]


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Run:
    """Train: the same data for the same kind; each time into another directory."""

    def go(kind: Kind, model: Path = tiny, pack: int | None = None, **more: Any) -> Done:
        data = tokens(kind, model, tmp_path / f"{kind}-{pack}.tokens", pack=pack)
        into = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        other = more.get("reference", "base")
        reference = None if other in ("base", "free") else other
        done = train(kind, settings_of(kind, model, **more), data, into, reference=reference)
        assert done is not None
        return done

    return go


def test_packed_rows_train_as_rows_of_their_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """And would not, if they saw each other."""
    packing: dict[str, Any] = ALL | {"packing": {"kind": "best_fit", "max_seq_len": 64}, "minibatch_size": 3}
    for attention in ("sdpa", "eager"):
        apart = run("sft", **ALL, attention=attention)
        packed = run("sft", pack=64, **packing, attention=attention)
        assert alike(apart, packed) == []

    def seeing(_: Any, positions: torch.Tensor) -> torch.Tensor:
        length = positions.shape[1]
        return torch.ones(len(positions), 1, length, length, dtype=torch.bool).tril()

    monkeypatch.setattr(models, "packed_masks", seeing)
    with pytest.raises(AttemptError, match="packing"):
        run("sft", pack=64, **packing)
    monkeypatch.setattr("rollout_worker.backends.training.trainer.check_packing", lambda *_: None)
    assert alike(apart, run("sft", pack=64, **packing))


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo", "ipo", "kto"])
def test_micro_batches_train_as_one_batch(run: Run, kind: Kind) -> None:
    """Of rows of other lengths, hence with other padding."""
    whole = run(kind, minibatch_size=8, gradient_accumulation=1)
    assert alike(whole, run(kind, minibatch_size=1, gradient_accumulation=8)) == []


def mean_of_means(trainer: RowTrainer, part: range, units: list[int], divisor: int, sums: Any) -> None:
    if part:
        mine = [units[place] for place in part]
        loss = trainer.algorithm.loss(trainer.models, trainer.collator.batch(mine))
        loss.sum = loss.sum / trainer.collator.divisor(mine, per_token=True) / trainer.settings.gradient_accumulation
        loss.sum.backward()
        loss.sum = loss.sum * divisor
        sums.add(loss)


def paired_per_micro_batch(trainer: RowTrainer, collator: Collator, units: list[int], parts: list[range]) -> None:
    partners = [collator.mismatched(range(len(part)), [units[place] for place in part]) for part in parts if part]
    trainer.algorithm.prepare(trainer.models, partners, len(units), lambda value: value)


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [("sft", "_minibatch", mean_of_means), ("kto", "_compare", paired_per_micro_batch)],
)
def test_a_step_that_depends_on_its_layout_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: Kind, name: str, wrong: Any
) -> None:
    """huggingface/transformers 34191; KTO paired within each device's batch."""
    monkeypatch.setattr(RowTrainer, name, wrong)
    whole = run(kind, minibatch_size=8, gradient_accumulation=1)
    assert whole.metrics[1].get("kl", 1.0) > 0
    assert alike(whole, run(kind, minibatch_size=2, gradient_accumulation=4))


def test_who_is_compared_with_whom() -> None:
    """The one before, round the end; never with itself, though an epoch ended in this step."""
    assert [partner([4, 7, 9], place) for place in range(3)] == [2, 0, 1]
    assert [partner([4, 7, 7, 9], place) for place in range(4)] == [3, 0, 0, 2]
    assert partner([4], 0) is None and partner([4, 4], 1) is None


def test_which_token_pads_does_not_matter(tiny: Path, tmp_path: Path) -> None:
    """Of a reward model neither: its score is read by the mask, not at the first end-of-sequence token."""
    from rollout_worker.algorithms.registered import make_algorithm
    from rollout_worker.backends.training.trainer import Job

    data = tokens("rm", tiny, tmp_path / "tokens")
    settings = settings_of("rm", tiny)
    first = trainer_of("rm", settings, data)  # it pads with 0
    scores = first.models.policy(first.collator.batch([0, 1, 2]))
    end = json.loads((tiny / "config.json").read_text())["eos_token_id"]
    forget_accelerator()
    second = RowTrainer(Job("rm", settings, data, str(tiny), pad=end), make_algorithm("rm", settings))
    assert second.models.policy(second.collator.batch([0, 1, 2])).equal(scores)


def test_checkpointed_activations_give_the_same_steps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    passes: list[int] = []
    real = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: passes.append(1) or real(self, x))
    kept = run("sft", **ALL)
    before = len(passes)
    again = run("sft", **ALL, gradient_checkpointing=True)
    assert alike(kept, again) == []
    assert len(passes) - before > before, "activations are computed again"


def test_half_precision_is_near_and_weights_stay_whole(run: Run) -> None:
    full, half = run("dpo", **ALL), run("dpo", **ALL, precision="bf16")
    assert half.metrics[0]["loss"] == pytest.approx(LN2, abs=1e-6), "policy and reference are computed alike"
    assert half.metrics[1]["loss"] == pytest.approx(full.metrics[1]["loss"], rel=0.03)
    assert half.metrics[1]["loss"] != full.metrics[1]["loss"]
    assert {tensor.dtype for tensor in half.weights.values()} == {torch.float32}


def test_gradients_are_clipped_and_their_norm_is_told_as_it_was(run: Run, tiny: Path) -> None:
    plain = {"kind": "sgd", "lr": 0.1, "schedule": "constant"}
    once = ALL | {"budget": {"max_steps": 1}}
    begun = state.load_weights(tiny)
    free, clipped = (run("sft", **once, optimizer=plain | {"max_grad_norm": most}) for most in (0.0, 0.5))
    assert clipped.metrics[0]["grad_norm"] == free.metrics[0]["grad_norm"] > 1

    def moved(done: Done) -> float:
        return math.sqrt(sum(float(((tensor - begun[name]) ** 2).sum()) for name, tensor in done.weights.items()))

    assert moved(clipped) == pytest.approx(0.1 * 0.5, rel=1e-3)
    assert moved(free) == pytest.approx(0.1 * free.metrics[0]["grad_norm"], rel=1e-3)


def test_a_fresh_adapter_is_no_difference_to_its_reference(run: Run, tiny: Path, tmp_path: Path) -> None:
    """Though the model under it has an adapter of another run: that one is a part of the reference."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tuned = run("sft", lora={"r": 4}, optimizer={"lr": 0.01}, **ALL)
    export_model(tuned.state, tmp_path / "tuned", base=str(tiny))
    preferred = run("dpo", model=tmp_path / "tuned", lora={"r": 2}, **ALL)
    assert preferred.metrics[0]["loss"] == pytest.approx(LN2, abs=1e-7)
    assert preferred.metrics[1]["loss"] < preferred.metrics[0]["loss"]
    assert preferred.metrics[0]["logps/chosen"] != run("dpo", **ALL).metrics[0]["logps/chosen"]

    for done in (tuned, preferred):
        assert all(".lora_A." in name or ".lora_B." in name for name in done.weights), "only the adapter is kept"
    told = json.loads((tuned.state / "model" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(tiny), "as the user named it, not a worker's copy"
    base: Any = AutoModelForCausalLM.from_pretrained(tiny)
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "tuned")
    ends = {name.replace(".default", ""): tensor for name, tensor in loaded.state_dict().items() if "lora_" in name}
    assert ends.keys() == tuned.weights.keys() and all(ends[name].equal(t) for name, t in tuned.weights.items())


def test_a_reward_models_adapter_keeps_its_head(run: Run, tiny: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    done = run("rm", lora={"r": 4}, **ALL)
    head = done.weights["base_model.model.score.weight"]
    export_model(done.state, tmp_path / "model", base=str(tiny))
    loaded: Any = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    assert loaded.state_dict()["base_model.model.score.modules_to_save.default.weight"].equal(head)


def test_a_reward_model_trained_further_keeps_its_head(run: Run, tmp_path: Path) -> None:
    done = run("rm", **ALL)
    export_model(done.state, tmp_path / "model")
    more = models.load_model(str(tmp_path / "model"), settings_of("rm", tmp_path), "score")
    assert more.state_dict()["score.weight"].equal(done.weights["score.weight"])


def test_what_a_policy_is_compared_with(run: Run, tied: Path) -> None:
    """Nothing; or another model, whose log-probabilities are those of a policy that begins as it."""
    free = run("dpo", **ALL, reference="free").metrics[0]
    other = run("dpo", **ALL, reference=str(tied)).metrics[0]
    assert free["rewards/chosen"] == pytest.approx(0.1 * free["logps/chosen"], rel=1e-5)
    theirs = run("dpo", model=tied, **ALL).metrics[0]["logps/chosen"]
    assert other["rewards/chosen"] == pytest.approx(0.1 * (free["logps/chosen"] - theirs), rel=1e-4)


def test_the_reference_has_no_dropout(dropping: Path, tmp_path: Path) -> None:
    data = tokens("dpo", dropping, tmp_path / "tokens")
    trainer = trainer_of("dpo", settings_of("dpo", dropping, disable_dropout=False), data)
    trainer.model.train()
    batch = trainer.collator.batch([0, 1])
    first, second = trainer.models.reference(batch), trainer.models.reference(batch)
    assert first is not None and second is not None and first.equal(second)
    assert not trainer.models.policy(batch).equal(trainer.models.policy(batch)), "the policy has"
    without = trainer_of("dpo", settings_of("dpo", dropping, disable_dropout=True), data)
    without.model.train()
    assert without.models.policy(batch).equal(first)


def test_tied_weights_are_kept_once_and_stay_tied(run: Run, tied: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = run("sft", model=tied)
    assert "lm_head.weight" not in done.weights
    data = tokens("sft", tied, tmp_path / "tokens")
    trainer = restored("sft", settings_of("sft", tied), data, done.state, tmp_path / "again")
    assert same_bytes(done.state, tmp_path / "again")
    assert trainer.plain.lm_head.weight is trainer.plain.model.embed_tokens.weight
    export_model(done.state, tmp_path / "model")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight.equal(done.weights["model.embed_tokens.weight"])


def test_an_evaluation_is_the_mean_over_all_rows(tiny: Path, tmp_path: Path) -> None:
    """However many at once, and KTO's divergence is that of all of them."""
    for kind in ("sft", "kto"):
        data = tokens(kind, tiny, tmp_path / kind)
        trainers = [trainer_of(kind, settings_of(kind, tiny, minibatch_size=size), data) for size in (9, 2)]
        one, other = (trainer.evaluate() for trainer in trainers)
        assert one is not None and other == pytest.approx(one, abs=1e-5)
        first = next(trainer_of(kind, settings_of(kind, tiny, **ALL), data).run(0, 1))
        assert one["loss"] == pytest.approx(first["loss"], abs=1e-5)


SCHEDULES: dict[str, tuple[float, float]] = {
    "constant": (1.0, 1.0),
    "constant_with_warmup": (1.0, 1.0),
    "linear": (0.5, 0.1),
    "cosine": (0.5, 0.5 * (1 + math.cos(math.pi * 0.9))),
    "cosine_with_min_lr": (0.6, 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.9))),
    "polynomial": (0.5, 0.1),
    "inverse_sqrt": (math.sqrt(2 / 7), math.sqrt(2 / 11)),
}
"""Shares of the highest rate at step 7 and at step 11 of 12, two of them to warm up."""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: Any) -> None:
    ratio, warmup = 0.2 if schedule == "cosine_with_min_lr" else 0.0, 0 if schedule == "constant" else 2
    section = OptimizerSection(lr=2.0, kind="sgd", schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    optimizer = make_optimizer(torch.nn.Linear(2, 2), section)
    rates = make_schedule(optimizer, section, 12)
    found: list[float] = []
    for _ in range(12):
        found.append(rates.get_last_lr()[0] / 2.0)
        optimizer.step()
        rates.step()
    if schedule != "constant":
        assert found[:3] == pytest.approx([0.0, 0.5, 1.0]), "it warms up"
    assert (found[7], found[11]) == pytest.approx(SCHEDULES[schedule], abs=1e-2)


@pytest.mark.parametrize(
    ("kind", "expected"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_optimizers(kind: Any, expected: type[torch.optim.Optimizer]) -> None:
    """One step is that of torch's own; biases and norms do not decay."""
    torch.manual_seed(0)
    mine, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    more: dict[str, Any] = {"momentum": 0.9} if kind == "sgd" else {"betas": (0.8, 0.9), "eps": 1e-6}
    section = OptimizerSection(kind=kind, lr=0.1, weight_decay=0.01, **more)
    ours = make_optimizer(mine, section)
    groups = [{"params": [theirs.weight], "weight_decay": 0.01}, {"params": [theirs.bias], "weight_decay": 0.0}]
    other: Any = expected(groups, lr=0.1, **more)  # type: ignore[call-arg]
    for model, optimizer in ((mine, ours), (theirs, other)):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).pow(2).sum().backward()
            optimizer.step()
    assert type(ours) is expected
    assert torch.allclose(mine.weight, theirs.weight, atol=1e-6) and torch.allclose(mine.bias, theirs.bias, atol=1e-6)


def test_devices_that_the_host_has_not(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttemptError, match="torch finds no GPU") as one:
        parallel.make_accelerator(settings_of("sft", tiny, device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(AttemptError, match="devices = 4, but this worker has 2 GPUs") as two:
        parallel.make_accelerator(settings_of("sft", tiny, device=None, devices=4, strategy="ddp"))
    assert one.value.error_code == two.value.error_code == "device_missing"


def test_a_model_that_lacks_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Not begun with random ones in their place."""
    from safetensors.torch import load_file, save_file

    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AttemptError, match=r"lack the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        models.load_model(str(tmp_path), settings_of("sft", tmp_path), "language_model")


def test_an_attention_that_a_model_refuses_names_one_that_it_takes(tmp_path: Path) -> None:
    config = GPTJConfig(
        n_layer=1, n_embd=32, n_head=2, rotary_dim=8, vocab_size=50, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    made: Any = AutoModelForCausalLM
    made.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    with pytest.raises(AttemptError, match=r'attention = "sdpa" .*: set attention = "eager"') as refused:
        models.load_model(str(tmp_path), settings_of("sft", tmp_path), "language_model")
    assert (refused.value.error_code, refused.value.retry) == ("model_invalid", False)
    assert models.load_model(str(tmp_path), settings_of("sft", tmp_path, attention="eager"), "language_model")


def test_a_file_that_is_written_into_changes_no_weights_that_are_loaded(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    data = tokens("dpo", tiny, tmp_path / "dpo.tokens")
    trainer = trainer_of("dpo", settings_of("dpo", model, lora={"r": 2}), data)
    before = [weight.clone() for weight in trainer.plain.parameters()]
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        file.seek(begin)
        file.write(bytes(weights.stat().st_size - begin))
    assert all(map(torch.equal, before, trainer.plain.parameters()))


def test_failures_that_the_user_can_do_something_about(tiny: Path, tmp_path: Path) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    data = tokens("sft", tiny, tmp_path / "tokens")
    trainer = trainer_of("sft", settings_of("sft", tiny), data)
    trainer.settings = trainer.settings.model_copy(update={"compile": True})
    for error, code, words in (
        (InvalidCxxCompiler(), "compile_failed", "install one"),
        (torch.OutOfMemoryError("no room"), "out_of_memory", "minibatch of 4 rows, the longest of"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "out_of_memory", "at step 1"),
    ):
        told = trainer._explained(error)
        assert told is not None and told.error_code == code and words in told.message
    assert trainer._explained(RuntimeError("something else")) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # torch's own compiler uses what torch has deprecated
def test_a_compiled_model_takes_the_same_steps(run: Run) -> None:
    once = ALL | {"budget": {"max_steps": 1}}
    assert alike(run("sft", **once), run("sft", **once, compile=True)) == []


@pytest.mark.parametrize("kind", ["sft", "rm"])
@pytest.mark.parametrize("lora", [None, {"r": 4}, {"r": 4, "target_modules": ["q_proj", "v_proj"]}])
def test_parameters_are_counted_without_a_model(tiny: Path, tmp_path: Path, kind: Kind, lora: Any) -> None:
    settings = settings_of(kind, tiny, lora=lora)
    config = json.loads((tiny / "config.json").read_text())
    counted = memory.count(kind, settings, memory.read_shapes(tiny), config)
    assert counted == trainer_of(kind, settings, tokens(kind, tiny, tmp_path / "tokens")).parameters


def test_memory_of_each_device(tiny: Path) -> None:
    shapes, config = memory.read_shapes(tiny), json.loads((tiny / "config.json").read_text())

    def of(kind: Kind = "sft", **more: Any) -> memory.Memory:
        return memory.estimate(kind, settings_of(kind, tiny, **more), shapes, config)

    plain = of()
    assert (plain.weights, plain.gradients, plain.optimizer) == (4 * 459_392, 4 * 459_392, 8 * 459_392)
    assert of(optimizer={"kind": "sgd"}).optimizer == 0 and of("dpo").reference == plain.weights
    assert of("dpo", reference="free").reference == of("dpo", lora={"r": 4}).reference == 0
    shared = of("dpo", devices=2, strategy="fsdp")
    assert (2 * shared.weights, 2 * shared.optimizer, 2 * shared.reference) == (
        plain.weights, plain.optimizer, plain.weights,
    )  # fmt: skip
    assert of(gradient_checkpointing=True).activations < plain.activations < of(attention="eager").activations


def test_speed_and_the_share_of_the_peak() -> None:
    assert speed.peak("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert speed.peak("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert speed.peak("NVIDIA A10G", "bf16") is speed.peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None
    found = speed.speed(1000, 2.0, flops_per_token=6e9, peak=30e12, devices=2)
    assert found == {"tokens_per_second": 500.0, "mfu": 0.05}
    assert speed.speed(10, 1.0, 1.0, None, 1) == {"tokens_per_second": 10.0}


def test_operations_of_a_token() -> None:
    """6 for each parameter in products, and 12 (layers) (hidden) (length); a reference adds a third."""
    config = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2}
    values = {"base_model": "m", "dataset": {"path": "x"}, "optimizer": {"lr": 1}, "budget": {"max_steps": 1}}
    sft = memory.flops_per_token("sft", SECTIONS["sft"].model_validate(values), 140, 140, config, 8)
    dpo = memory.flops_per_token("dpo", SECTIONS["dpo"].model_validate(values), 140, 140, config, 8)
    assert sft == 6 * 100 + 12 * 2 * 4 * 8 and dpo == pytest.approx(sft * 4 / 3)


def test_training_stops_after_evaluations_that_are_no_better() -> None:
    """Two in a row; one that is lower by less than `min_delta` is none."""
    known: dict[str, Any] = {}
    stopped: list[bool] = []
    for step, loss in enumerate((math.nan, 3.0, 2.0, 1.95, 1.5, 1.45, 1.6)):
        known, stop = stopping_after(known, step, loss, 2, 0.1)
        stopped.append(stop)
    assert stopped == [False, False, False, False, False, False, True]
    assert known["best_evaluation"] == {"step": 5, "loss": 1.45}, "the lowest, by however little"
    assert known["last_evaluation"] == {"step": 6, "loss": 1.6}
    assert not stopping_after({"best": 1.0, "since": 9}, 9, 2.0, 0, 0.0)[1], "patience = 0: never"
