"""Losses by hand-derived numbers, and beside TRL on the same model and rows: values and gradients."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rollout.workloads.tables import without_nulls
from rollout.workloads.train.aliases import KEYS, renamed
from rollout.workloads.train.config import SECTIONS, Kind
from rollout_worker.algorithms import dpo, ipo, kto, preference, rm
from rollout_worker.algorithms.port import Batch, Loss, Models, token_logps
from rollout_worker.algorithms.sft import SupervisedFineTuning
from torch import Tensor

LN2 = math.log(2)


def slope(losses: Any, at: float) -> tuple[float, float]:
    """(loss, derivative) at a difference of log-ratios."""
    x = torch.tensor([at], requires_grad=True)
    y = losses(x)
    y.sum().backward()
    assert x.grad is not None
    return y.item(), x.grad.item()


ONE_TOKEN: list[tuple[Any, float, float]] = [
    (lambda d: dpo.pair_losses(d, 0.1, 0.0, "sigmoid"), 0.437488, -0.035434),
    (lambda d: dpo.pair_losses(d, 0.1, 0.0, "hinge"), 0.4, -0.1),
    (lambda d: ipo.pair_losses(d, 0.1), 1.0, 2.0),
    # A quarter of the pairs the wrong way round.
    (lambda d: dpo.pair_losses(d, 0.1, 0.25, "sigmoid"), 0.75 * 0.437488 + 0.25 * 1.037488, -0.010434),
]


@pytest.mark.parametrize(("losses", "loss", "derivative"), ONE_TOKEN)
def test_one_token_with_beta_a_tenth_and_a_margin_of_six(losses: Any, loss: float, derivative: float) -> None:
    assert slope(losses, 6.0) == pytest.approx((loss, derivative), abs=2e-6)


def test_a_sigmoid_under_every_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift 10167."""
    real = dpo.pair_losses
    monkeypatch.setattr(dpo, "pair_losses", lambda d, beta, smoothing, name: real(d, beta, smoothing, "sigmoid"))
    monkeypatch.setattr(ipo, "pair_losses", lambda d, beta: real(d, beta, 0.0, "sigmoid"))
    right = [slope(losses, 6.0) == pytest.approx((loss, d), abs=2e-6) for losses, loss, d in ONE_TOKEN]
    assert right == [True, False, False, True]


@pytest.mark.parametrize(
    ("chosen", "rejected", "mean"),
    [
        ([1.0], [1.0], LN2),
        ([-5.0], [5.0], 10.0000454),
        ([2.0, 1.0], [1.0, 2.0], 0.8132617),
        ([25.0], [-25.0], 0.0),
        ([-25.0], [25.0], 50.0),
    ],
)
def test_bradley_terry(chosen: list[float], rejected: list[float], mean: float) -> None:
    assert float(rm.pair_losses(torch.tensor(chosen), torch.tensor(rejected)).mean()) == pytest.approx(mean, abs=1e-5)


def test_margin_centring_and_scale_of_a_reward_model() -> None:
    one, two, margin = torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([1.0])
    assert float(rm.pair_losses(one, two, margin)) == pytest.approx(math.log1p(math.exp(-0.5)))
    assert float(rm.pair_losses(one, two, None, 1.0, 0.1)) == pytest.approx(math.log1p(math.exp(-1.5)) + 0.1 * 6.25)
    assert float(rm.pair_losses(one, two, None, 3.0)) == pytest.approx(math.log1p(math.exp(-4.5)))


def test_a_score_is_read_at_the_last_token_though_padding_is_the_end_token() -> None:
    scores, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert rm.last_token(scores, mask).tolist() == [3.0, 5.0]


def test_kto_by_hand() -> None:
    ratios, good = torch.tensor([2.0, 2.0]), torch.tensor([True, False])
    found = kto.row_losses(ratios, good, torch.tensor(0.5), 0.1, 2.0, 3.0)
    s = 1 / (1 + math.exp(-0.15))
    assert found.tolist() == pytest.approx([2 * (1 - s), 3 * s])


class Fixed:
    """Models whose logits are given, each for as many sequences as are asked for."""

    def __init__(self, policy: Tensor, reference: Tensor | None = None) -> None:
        self._policy, self._reference = policy, reference

    def policy(self, batch: Batch) -> Tensor:
        return self._policy[: len(batch.input_ids)]

    def reference(self, batch: Batch) -> Tensor | None:
        return None if self._reference is None else self._reference[: len(batch.input_ids)]


def batch_of(labels: list[list[int]], **more: Any) -> Batch:
    ids = torch.tensor([[max(one, 0) for one in row] for row in labels])
    return Batch(ids, torch.ones_like(ids), torch.tensor(labels), tuple(range(len(labels))), **more)


def test_sft_counts_what_is_learnt_and_nothing_else() -> None:
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(1))
    models: Models = Fixed(logits)
    found: Loss = SupervisedFineTuning().loss(models, batch_of([[-100, -100, 3, 1]]))
    wanted = -(logits[0, 1].log_softmax(-1)[3] + logits[0, 2].log_softmax(-1)[1])
    assert found.sum.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert token_logps(logits, torch.tensor([[-100, -100, 3, 1]]))[1].tolist() == [[False, True, True]]


def test_ipo_divides_each_completion_by_its_own_length() -> None:
    generator = torch.Generator().manual_seed(2)
    policy, reference = (torch.randn(2, 4, 5, generator=generator) for _ in range(2))
    labels = [[-100, 1, 2, 3], [-100, -100, -100, 4]]
    found = ipo.IdentityPreference(0.1).loss(Fixed(policy, reference), batch_of(labels))
    ours, theirs = (token_logps(logits, torch.tensor(labels))[0].sum(1) for logits in (policy, reference))
    d = (ours - theirs)[0] / 3 - (ours - theirs)[1] / 1
    assert found.sum.item() == pytest.approx(((d - 5) ** 2).item(), rel=1e-5)


def test_the_divergence_of_kto_is_of_the_whole_step_detached_and_never_negative() -> None:
    generator = torch.Generator().manual_seed(3)
    policy, reference = (torch.randn(2, 3, 5, generator=generator).requires_grad_() for _ in range(2))
    batch = batch_of([[-100, 1, 2], [-100, 3, 4]], desirable=torch.tensor([True, False]))
    algorithm = kto.KahnemanTversky(0.1)
    asked: list[float] = []

    def from_all_ranks(mine: Tensor) -> Tensor:
        asked.append(float(mine))
        return mine + 10.0  # another rank's

    algorithm.prepare(Fixed(policy, reference), [batch], 4, from_all_ranks)
    found = algorithm.loss(Fixed(policy, reference), batch)
    assert float(found.metrics["kl"][0] / found.metrics["kl"][1]) == pytest.approx((asked[0] + 10.0) / 4)
    assert not found.metrics["kl"][0].requires_grad
    algorithm.prepare(Fixed(policy, reference), [], 4, lambda mine: mine - 1.0)
    assert float(algorithm.loss(Fixed(policy, reference), batch).metrics["kl"][0]) == 0.0


def test_without_a_reference_the_policy_stands_alone() -> None:
    policy = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(4))
    labels = [[-100, 1, 2], [-100, 3, 4]]
    logps = token_logps(policy, torch.tensor(labels))[0].sum(1)
    found = dpo.DirectPreference(0.1).loss(Fixed(policy), batch_of(labels))
    wanted = dpo.pair_losses((logps[0] - logps[1])[None], 0.1, 0.0, "sigmoid")
    assert found.sum.item() == pytest.approx(wanted.item(), abs=1e-6)


ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}, which is even" * (1 + n % 3)} for n in range(6)],
    "rm": [{"prompt": f"{n} is", "chosen": f" {n}" * (1 + n % 3), "rejected": " no" * (1 + n % 2)} for n in range(6)],
    "dpo": [{"prompt": f"{n} is", "chosen": f" {n}" * (1 + n % 3), "rejected": " no" * (1 + n % 2)} for n in range(6)],
    "kto": [{"prompt": f"{n} is", "completion": f" {n}" * (1 + n % 4), "label": n % 3 > 0} for n in range(7)],
}


def ours(kind: str, rows: list[dict[str, Any]], directory: Path, models: Any, algorithm: Any) -> Loss:
    from rollout.workloads.train.dataset import build
    from rollout.workloads.train.encode import FAULTS, Encoder
    from rollout.workloads.train.report import Place
    from rollout.workloads.train.rows import parse_row
    from rollout.workloads.train.templates import find_template
    from rollout_worker.backends.training.collate import Collator
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    encoder = Encoder(tokenizer, find_template(tokenizer, None), 256)
    encoded = [
        (Place(i, "rows", i), encoder.encode(row))
        for i, value in enumerate(rows, 1)
        for row in parse_row(cast(Kind, kind), value)
    ]
    data, _ = build(encoded, dict.fromkeys(FAULTS, "error"))
    collator = Collator(data, tokenizer.pad_token_id, torch.device("cpu"), packed=False, longest=256)
    units = list(range(data.units))
    partners = [collator.mismatched(units, units)] if kind == "kto" else []
    algorithm.prepare(models, partners, len(units), lambda value: value)
    loss = algorithm.loss(models, collator.batch(units))
    loss.sum = loss.sum / collator.divisor(units, per_token=algorithm.per_token)
    return loss


def theirs(kind: str, rows: list[dict[str, Any]], directory: Path, model: Any, reference: Any, out: Path) -> Tensor:
    import importlib

    from datasets import Dataset
    from transformers import AutoTokenizer

    trl: Any = importlib.import_module("trl")  # which says nothing of its types
    common: dict[str, Any] = {
        "output_dir": str(out), "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": len(rows), "max_length": 256, "dataloader_pin_memory": False,
    }  # fmt: skip
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    more: dict[str, Any] = {"model": model, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    if kind == "sft":
        trainer: Any = trl.SFTTrainer(args=trl.SFTConfig(**common), **more)
    elif kind == "rm":
        trainer = trl.RewardTrainer(args=trl.RewardConfig(**common), **more)
    elif kind == "kto":
        arguments = trl.KTOConfig(**common, beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
        trainer = trl.KTOTrainer(args=arguments, ref_model=reference, **more)
    else:
        types = {"dpo": "sigmoid", "hinge": "hinge", "ipo": "ipo"}
        arguments = trl.DPOConfig(**common, beta=0.2, loss_type=types[kind])
        trainer = trl.DPOTrainer(args=arguments, ref_model=reference, **more)
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    return trainer.compute_loss(trainer.model, inputs)


def compared(kind: str, tiny: Path, out: Path) -> tuple[float, float, float]:
    """(difference of the losses; the largest of the gradients, as a share of the largest of them; the mean of all)."""
    from copy import deepcopy

    from rollout_worker.backends.training.models import ScoreModel, StepModels
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(3)  # with which KTO's divergence is above 0, where its pairs have an effect
    kinds = {"hinge": "dpo", "ipo": "dpo"}
    rows = ROWS[kinds.get(kind, kind)]
    if kind == "rm":
        model: Any = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
        mine: Any = ScoreModel(deepcopy(model.model), model.config.hidden_size)
        mine.score.load_state_dict(model.score.state_dict())
        reference = None
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        mine, reference = deepcopy(model), deepcopy(model)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    algorithm: Any = {
        "sft": SupervisedFineTuning,
        "dpo": lambda: dpo.DirectPreference(0.2),
        "hinge": lambda: dpo.DirectPreference(0.2, loss_type="hinge"),
        "ipo": lambda: ipo.IdentityPreference(0.2),
        "kto": lambda: kto.KahnemanTversky(0.2, 1.5, 0.5),
        "rm": rm.RewardModel,
    }[kind]()
    mine.eval()
    model.eval()
    found = ours(kinds.get(kind, kind), rows, tiny, StepModels(mine, deepcopy(reference)), algorithm)
    wanted = theirs(kind, rows, tiny, model, reference, out)
    found.sum.backward()
    wanted.backward()
    named = dict(model.named_parameters())
    differences = torch.cat(
        [
            (parameter.grad - named[name].grad).abs().flatten()
            for name, parameter in mine.named_parameters()
            if parameter.grad is not None
        ]
    )
    scale = max(float(parameter.grad.abs().max()) for parameter in named.values() if parameter.grad is not None)
    return abs(found.sum.item() - wanted.item()), float(differences.max()) / max(scale, 1.0), float(differences.mean())


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sft", "dpo", "hinge", "ipo", "kto", "rm"])
def test_values_and_gradients_are_those_of_trl(kind: str, tiny: Path, tmp_path: Path) -> None:
    """All rows in one batch, in their order: there TRL's pairing within a device is that of the whole step."""
    loss, largest, mean = compared(kind, tiny, tmp_path)
    assert loss < 1e-5 and largest < 1e-5 and mean < 1e-6


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name"), [("sft", "SFTConfig"), ("dpo", "DPOConfig"), ("kto", "KTOConfig"), ("rm", "RewardConfig")]
)
def test_all_that_trl_writes_out_can_be_pasted(kind: Kind, name: str, tmp_path: Path) -> None:
    """A configuration at its defaults, by the names that its own dataclass has."""
    import importlib

    config: Any = getattr(importlib.import_module("trl"), name)
    own = config(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False).to_dict()
    known = SECTIONS[kind].model_fields.keys() | KEYS.keys() | {"loss_type"}
    assert len(own) > 100 and {field.name for field in fields(config)} | own.keys() <= known
    found = renamed({"algorithm": {"kind": kind, kind: without_nulls(own)}}, {kind: SECTIONS[kind].model_fields})
    assert found.faults == []
    section = {**found.values["algorithm"][kind], "base_model": "tiny", "dataset": "rows.jsonl"}
    assert SECTIONS[kind].model_validate(section).budget.epochs == own["num_train_epochs"]


def prompts_are_learnt(patch: pytest.MonkeyPatch) -> None:
    from rollout_worker.backends.training.collate import Collator

    real = Collator._tokens
    patch.setattr(Collator, "_tokens", lambda *given: (real(*given)[0], real(*given)[1] | True))


def ratios_are_summed(patch: pytest.MonkeyPatch) -> None:
    def summed(models: Models, batch: Batch) -> preference.Sequences:
        found = preference.sequences(models, batch)
        return replace(found, lengths=torch.ones_like(found.lengths))

    patch.setattr(ipo, "sequences", summed)


def the_first_is_its_own_partner(patch: pytest.MonkeyPatch) -> None:
    from rollout_worker.backends.training import collate

    patch.setattr(collate, "partner", lambda step, place: len(step) - 1 - place)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("sft", prompts_are_learnt),
        ("ipo", ratios_are_summed),
        ("kto", the_first_is_its_own_partner),
    ],
)
def test_a_wrong_variant_is_noticed(
    kind: str, wrong: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was somebody's bug: trl 1265 (IPO's sum), 1402 (a row that is its own pair)."""
    wrong(monkeypatch)
    loss, _, mean = compared(kind, tiny, tmp_path)
    assert loss > 1e-3 or mean > 1e-5
