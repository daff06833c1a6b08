"""GRPO's family by hand-derived numbers, and beside TRL's own code on the same logits: values, gradients, metrics."""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout.workloads.train.policy_config import GrpoSection
from rollout_worker.algorithms import grpo
from rollout_worker.algorithms.advantages import group_advantages
from rollout_worker.algorithms.correction import correct
from rollout_worker.algorithms.grpo import GroupRelative, importance_ratio, k3
from rollout_worker.algorithms.policy_port import PolicyBatch, Update
from rollout_worker.algorithms.port import Loss, token_logps
from rollout_worker.algorithms.registered import make_policy_algorithm
from torch import Tensor

NAN = math.nan


def of_ratios(algorithm: Any, ratios: list[float], advantages: list[float], logps: list[float] | None = None) -> float:
    """The mean loss of a sample with these ratios and advantages of its tokens."""
    new = torch.tensor([logps or [-1 + math.log(ratio) for ratio in ratios]], requires_grad=True)
    old = new.detach() - torch.tensor([ratios]).log()
    ids, mask = torch.zeros(1, len(ratios) + 1, dtype=torch.int64), torch.ones(1, len(ratios), dtype=torch.bool)
    batch = PolicyBatch(ids, ids, ids, (0,), advantages=torch.tensor([advantages]), old_logps=old)
    return algorithm.loss(new, mask, batch).sum.item() / algorithm.divisor(Update(1, len(ratios), 1))


@pytest.mark.parametrize(
    ("settings", "ratios", "advantages", "logps", "loss"),
    [
        ({}, [0.5, 1, 1.5], [1, -1, 2], None, -0.6333),
        ({"delta": 3.0}, [0.5, 1, 10], [1, -1, -4], None, 4.1667),
        ({"importance_sampling_level": "sequence"}, [0.5, 1, 1.5], [1, -1, 2], None, -0.6057),
        # The first ratio at the floor 0.8 of NeMo-RL, whose number it is: here none is.
        (
            {"loss_type": "cispo", "epsilon_high": 1.2},
            [0.8, 1, 1.5],
            [1, -1, 2],
            [-1 + math.log(0.5), -1, -1 + math.log(1.5)],
            0.5938,
        ),
    ],
)
def test_golden_values(
    settings: Any, ratios: list[float], advantages: list[float], logps: list[float] | None, loss: float
) -> None:
    assert of_ratios(GroupRelative(**settings), ratios, advantages, logps) == pytest.approx(loss, abs=1e-4)


def test_golden_values_of_the_ratio_and_of_k3() -> None:
    mask, old = torch.ones(1, 3, dtype=torch.bool), torch.full((1, 3), -1.0)
    new = old + torch.tensor([[0.5, 1, 1.5]]).log()
    assert float(importance_ratio(new, old, mask, "sequence")) == pytest.approx(0.9086, abs=1e-4)
    assert k3(old, torch.tensor([[0.0, -15, -30]]), mask)[0].tolist() == pytest.approx([0.7183, 13, 28], abs=1e-4)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token_truncate", [[2, 0.5, 1], [3, 1, 1]]),
        ("token_mask", [[2, 0.5, 1], [0, 1, 1]]),
        ("sequence_truncate", [[1], [3]]),
        ("sequence_mask", [[1], [0]]),
        ("off", [[1]]),
    ],
)
def test_weights_against_the_engine(mode: Any, weights: list[list[float]]) -> None:
    """Of the second sample, the last token is the environment's, and the engine did not know the second."""
    ratios = torch.tensor([[2, 0.5, 1], [4, 1, 8]])
    engine = torch.tensor([[-1.0, -1, -1], [-1, NAN, -1]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    found = correct(mode, 3.0, -1 + ratios.log(), engine, mask)
    assert [row[: len(row)] for row in found.weights.tolist()] == [pytest.approx(row) for row in weights]
    name = "sampling/sampling_logp_difference"
    above, below = found.metrics[f"{name}/mean"]
    assert float(above / below) == pytest.approx(4 * math.log(2) / 4)
    assert float(found.most[f"{name}/max"]) == pytest.approx(math.log(4))
    if mode != "off":
        counted = [
            w for row, m in zip(weights, mask.tolist(), strict=True) for w, on in zip(row, m, strict=False) if on
        ]
        name = "sampling/importance_sampling_ratio"
        above, below = found.metrics[f"{name}/mean"]
        assert float(above / below) == pytest.approx(sum(counted) / len(counted))
        assert float(found.least[f"{name}/min"]) == pytest.approx(min(counted))
        assert float(found.most[f"{name}/max"]) == pytest.approx(max(counted))


# ---- beside TRL

P, C, V = 2, 5, 9
LENGTHS = [5, 3, 1, 4, 5, 2]
TOOLS = [(0, 1), (0, 2), (3, 2)]  # (sample, token) that an environment wrote
MASKED = 4  # a sample of which nothing is learnt
B = len(LENGTHS)


@dataclass
class Case:
    """`logits`: (B, P + C, V); the others: (B, C) but `ids` (B, P + C) and `advantages` (B,). What is not learnt has
    numbers, too, and they must not count."""

    ids: Tensor
    logits: Tensor
    drawn: Tensor
    learnt: Tensor
    advantages: Tensor
    old: Tensor
    engine: Tensor
    reference: Tensor

    @property
    def logps(self) -> Tensor:
        """As TRL has them, of completions."""
        return self.logits.log_softmax(-1)[:, P - 1 : -1].gather(2, self.ids[:, P:, None]).squeeze(2)


def make_case() -> Case:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(V, (B, P + C), generator=generator)
    drawn = torch.arange(C) < torch.tensor(LENGTHS)[:, None]
    drawn[MASKED] = False
    learnt = drawn.clone()
    for sample, token in TOOLS:
        learnt[sample, token] = False
    case = Case(ids, normal(B, P + C, V), drawn, learnt, normal(B), *(torch.zeros(B, C) for _ in range(3)))
    old = case.logps + 0.3 * normal(B, C)
    case.logits.requires_grad_()
    return replace(case, old=old, engine=old + 0.3 * normal(B, C), reference=old + 0.5 * normal(B, C))


def ours(case: Case, settings: dict[str, Any], parts: int, *, on_policy: bool = False, local: bool = False) -> Loss:
    """`local`: a wrong variant, with the mean of what micro-batches would give alone."""
    algorithm = make_policy_algorithm(GrpoSection.model_construct(max_completion_length=C, **settings))

    def placed(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (P - 1, 0), value=0.5)

    def update(of: Tensor) -> Update:
        rows = [part for part in of.chunk(1 if local else parts) if case.learnt[part].any()]
        return Update(len(of), int(case.learnt[of].sum()), len(rows))

    found = Loss(torch.zeros(()))
    for rows in torch.arange(B).chunk(parts):
        labels = case.ids[rows].masked_fill(~torch.nn.functional.pad(case.learnt[rows], (P, 0)), -100)
        batch = PolicyBatch(
            case.ids[rows],
            torch.ones_like(labels),
            labels,
            tuple(rows.tolist()),
            advantages=case.advantages[rows],
            old_logps=None if on_policy else placed(case.old[rows]),
            engine_logps=placed(case.engine[rows]),
            reference_logps=placed(case.reference[rows]),
        )
        logps, mask = token_logps(case.logits[rows], labels)
        loss = algorithm.loss(logps, mask, batch)
        divided = (
            loss.sum / algorithm.divisor(update(rows)) / parts
            if local
            else loss.sum / algorithm.divisor(update(torch.arange(B)))
        )
        found = Loss(found.sum + divided, loss.metrics, loss.least, loss.most)
    return found


def engine_weights(case: Case, mode: str, cap: float) -> Tensor:
    """TRL computes them where it generates, which no test can call alone."""
    difference = (case.old - case.engine) * case.learnt
    ratio = (difference.sum(1, keepdim=True) if "sequence" in mode else difference).exp()
    return ratio.clamp(max=cap) if "truncate" in mode else ratio.masked_fill(ratio > cap, 0)


def theirs(case: Case, settings: dict[str, Any], parts: int, *, on_policy: bool = False) -> tuple[Tensor, Any]:
    trl: Any = importlib.import_module("trl")
    epsilon, mode = settings.get("epsilon", 0.2), settings.get("importance_sampling_correction", "off")
    weights = engine_weights(case, mode, settings.get("importance_sampling_cap", 3.0)) if mode != "off" else None
    total, metrics = torch.zeros(()), defaultdict[str, list[float]](list)
    for rows in torch.arange(B).chunk(parts):
        logps = case.logps[rows]
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, logps=logps, **__: (logps, torch.zeros_like(logps), None),
            loss_type=settings.get("loss_type", "dapo"),
            importance_sampling_level=settings.get("importance_sampling_level", "token"),
            beta=settings.get("beta", 0.0),
            epsilon_low=epsilon,
            epsilon_high=settings.get("epsilon_high", epsilon),
            args=SimpleNamespace(
                delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=parts
            ),
            max_completion_length=C,
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=weights is not None,
            current_gradient_accumulation_steps=parts,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value),
            _metrics={"train": metrics},
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
        )  # fmt: skip
        inputs = {
            "prompt_ids": case.ids[rows, :P],
            "prompt_mask": torch.ones(len(rows), P),
            "completion_ids": case.ids[rows, P:],
            "completion_mask": case.drawn[rows].int(),
            "tool_mask": case.learnt[rows].int(),
            "advantages": case.advantages[rows],
            "num_items_in_batch": case.learnt.sum(),
            "ref_per_token_logps": case.reference[rows],
            "old_per_token_logps": None if on_policy else case.old[rows],
            "importance_sampling_ratio": None if weights is None else weights[rows],
        }
        total = total + trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    return total, metrics


def apart(case: Case, found: Tensor, wanted: Tensor) -> tuple[float, float, float]:
    """(difference of the losses, the largest of the gradients, the mean of them)."""
    mine, other = (torch.autograd.grad(loss, case.logits, retain_graph=True)[0] for loss in (found, wanted))
    difference = (mine - other).abs()
    return abs((found - wanted).item()), float(difference.max()), float(difference.mean())


SWITCHES: list[dict[str, Any]] = [
    {},
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"epsilon": 0.1},
    {"epsilon_high": 0.5},
    {"delta": 1.3},
    {"beta": 0.2},
    {"importance_sampling_level": "sequence", "epsilon": 0.05},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"importance_sampling_level": "sequence", "loss_type": "cispo", "epsilon_high": 1.01},
    {"importance_sampling_correction": "sequence_mask", "importance_sampling_cap": 1.2},
    {"importance_sampling_correction": "sequence_truncate", "importance_sampling_cap": 1.2},
    {"importance_sampling_correction": "token_mask", "importance_sampling_cap": 1.2},
    {"importance_sampling_correction": "token_truncate", "importance_sampling_cap": 1.2, "beta": 0.1},
    {
        "importance_sampling_correction": "token_truncate", "importance_sampling_level": "sequence",
        "loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.02, "beta": 0.3,
    },
]  # fmt: skip


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("settings", SWITCHES, ids=lambda settings: ",".join(map(str, settings.values())) or "defaults")
def test_values_and_gradients_are_those_of_trl(settings: dict[str, Any], parts: int) -> None:
    """`parts`: micro-batches of the update. Metrics are compared where TRL, too, has them of the whole update."""
    case = make_case()
    found, (wanted, metrics) = ours(case, settings, parts), theirs(case, settings, parts)
    loss, largest, mean = apart(case, found.sum, wanted)
    assert loss < 1e-5 and largest < 1e-5 and mean < 1e-7
    if parts == 1 and settings.get("importance_sampling_level") != "sequence":
        mine = {name: float(a / b) for name, (a, b) in found.metrics.items()} | found.least | found.most
        mine = {name: float(value) for name, value in mine.items() if not name.startswith("sampling/")}
        assert mine == {name: pytest.approx(value[0], abs=1e-6) for name, value in metrics.items() if name != "entropy"}


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", [{}, {"loss_type": "cispo", "epsilon_high": 5.0}, {"beta": 0.1}])
def test_at_its_first_update_the_policy_is_the_old_one(settings: dict[str, Any]) -> None:
    case = make_case()
    found, (wanted, _) = ours(case, settings, 2, on_policy=True), theirs(case, settings, 2, on_policy=True)
    loss, largest, mean = apart(case, found.sum, wanted)
    assert loss < 1e-5 and largest < 1e-5 and mean < 1e-7


@pytest.mark.parametrize("settings", SWITCHES[1:], ids=lambda settings: ",".join(map(str, settings.values())))
def test_every_switch_has_an_effect(settings: dict[str, Any]) -> None:
    """On the case above, so that it would show which one is not obeyed."""
    case = make_case()
    for name in settings:
        less = {key: value for key, value in settings.items() if key != name}
        if name == "importance_sampling_correction":
            less.pop("importance_sampling_cap", None)
        loss, *_, mean = apart(case, ours(case, settings, 2).sum, ours(case, less, 2).sum)
        assert max(loss, mean) > 5e-6, name


def k1(logps: Tensor, reference_logps: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logps - reference_logps, 0.0)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"loss_type": "dapo"}, "local means"),
        ({"loss_type": "dapo"}, "tools are learnt"),
        ({"loss_type": "grpo"}, "tools are learnt"),
        ({"loss_type": "dapo"}, "ratio against the engine"),
        ({"loss_type": "dapo"}, "old one token apart"),
        ({"beta": 0.2}, "k1"),
        ({"importance_sampling_correction": "token_truncate"}, "correction of the present policy"),
    ],
)
def test_a_wrong_variant_is_noticed(settings: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was somebody's bug: verl 5625 (local means), others in the table of traps."""
    case = make_case()
    wanted, _ = theirs(case, settings, 2)
    if wrong == "k1":
        monkeypatch.setattr(grpo, "k3", k1)
    changed = {
        "tools are learnt": replace(case, learnt=case.drawn),
        "ratio against the engine": replace(case, old=case.engine),
        "old one token apart": replace(case, old=case.old.roll(1, 1)),
        "correction of the present policy": replace(case, old=case.logps.detach()),
    }.get(wrong, case)
    loss, _, mean = apart(case, ours(changed, settings, 2, local=wrong == "local means").sum, wanted)
    assert loss > 1e-3 and mean > 1e-4


@pytest.mark.parametrize("settings", SWITCHES, ids=lambda settings: ",".join(map(str, settings.values())) or "defaults")
@pytest.mark.parametrize("empty", ["nothing learnt", "no variance"])
def test_where_nothing_can_be_learnt_the_loss_is_zero_and_has_a_graph(settings: dict[str, Any], empty: str) -> None:
    case, settings = make_case(), settings | {"beta": 0.0}
    if empty == "nothing learnt":
        case = replace(case, learnt=torch.zeros_like(case.learnt))
    else:
        case = replace(case, advantages=torch.zeros(B))
    found = ours(case, settings, 2)
    (gradient,) = torch.autograd.grad(found.sum, case.logits)
    assert found.sum.item() == 0 and not gradient.any()
    assert all(torch.isfinite(above) for above, _ in found.metrics.values())


@pytest.mark.parametrize("settings", SWITCHES, ids=lambda settings: ",".join(map(str, settings.values())) or "defaults")
def test_a_policy_that_ran_away_has_finite_gradients(settings: dict[str, Any]) -> None:
    case = make_case()
    far = torch.where(torch.arange(C) % 2 == 0, 200.0, -200.0)
    case = replace(case, old=case.old - far, reference=case.reference + far, engine=case.engine + far)
    found = ours(case, settings, 2)
    assert torch.isfinite(found.sum) and torch.isfinite(torch.autograd.grad(found.sum, case.logits)[0]).all()


# ---- advantages

SPREAD = [[1.0, 0, 0, 1], [3, 1, 2, 2], [0.1, 0.1, 0.1, 0.1]]


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_groups_are_those_of_trl(scale: Any) -> None:
    """Its lines, with its function: they stand in the middle of what generates."""
    nanstd: Any = importlib.import_module("trl.trainer.utils").nanstd
    rewards = torch.tensor([*SPREAD, [NAN, 1, 2, 6]])
    deviation = {"group": nanstd(rewards, 1, True), "batch": nanstd(rewards), "none": torch.tensor(1 - 1e-4)}[scale]
    wanted = torch.nan_to_num((rewards - rewards.nanmean(1, keepdim=True)) / (deviation + 1e-4), nan=0.0)
    found, share = group_advantages(rewards, scale)
    assert (found - wanted).abs().max() < 1e-5 and share == 0.25


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_that_says_nothing_has_exactly_no_advantage(scale: Any) -> None:
    """Rounding would be an update. One of equal rewards, one with one sample left, one with none, which is no group."""
    rewards = torch.tensor([[0.1] * 3, [1e7 + 0.1] * 3, [NAN, 5, NAN], [NAN] * 3, [0.1 + 0.2, 0.3, 0.3], [1, 2, 3]])
    found, share = group_advantages(rewards.double(), scale)
    assert not found[:5].any() and found[5].tolist() == pytest.approx([-float(found[5, 2]), 0, float(found[5, 2])])
    assert share == 0.8 and group_advantages(torch.tensor([[NAN, NAN]]))[1] == 0.0
