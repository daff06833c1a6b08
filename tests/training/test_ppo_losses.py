"""PPO by hand-derived numbers, and beside a second implementation that goes token by token as TRL's formulas say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rollout.workloads.train.policy_config import PpoSection
from rollout_worker.algorithms.advantages import gae, token_rewards, whiten
from rollout_worker.algorithms.policy_port import PolicyBatch, Update
from rollout_worker.algorithms.port import Loss
from rollout_worker.algorithms.ppo import Proximal
from rollout_worker.algorithms.registered import make_policy_algorithm
from torch import Tensor

T = True
F = False


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def batch_of(advantages: Tensor, old: Tensor, values: Tensor, returns: Tensor, **more: Any) -> PolicyBatch:
    ids = torch.zeros(len(old), old.shape[1] + 1, dtype=torch.int64)
    return PolicyBatch(
        ids, ids, ids, tuple(range(len(old))),
        advantages=advantages, old_logps=old, values=values, returns=returns, **more,
    )  # fmt: skip


def test_golden_values_of_gae() -> None:
    everything = torch.ones(1, 4, dtype=torch.bool)
    advantages, returns = gae(table([0, 0, 5]), table([1, 2, 3]), everything[:, 1:], 1.0, 0.0)
    assert advantages.tolist() == [[1, 1, 2]] and returns.tolist() == [[2, 3, 5]]
    _, returns = gae(table([0, 0, 0, 1]), table([0, 0, 0, 1]), everything, 0.9, 0.95)
    assert returns[0].tolist() == pytest.approx([0.6579, 0.7695, 0.9, 1], abs=1e-4)


def test_golden_value_of_the_clipped_surrogate() -> None:
    nothing, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    old = torch.full((1, 3), -1.0)
    batch = batch_of(table([1, -1, 2]), old, nothing, nothing)
    found = Proximal().loss(old + table([0.5, 1, 1.5]).log(), mask, batch, nothing)
    assert found.sum.item() / 3 == pytest.approx(-0.6333, abs=1e-4)


def test_the_clipped_value_loss_by_hand() -> None:
    """Old values 0, e_v 0.2. 1 against 2: clipped to 0.2, of which the error is larger; 1 against 0: the free one is."""
    nothing, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    values = torch.ones(1, 2, requires_grad=True)
    batch = batch_of(nothing, nothing, nothing, table([2, 0]))
    found = Proximal(vf_coef=0.5).loss(nothing, mask, batch, values)
    found.sum.backward()
    assert found.sum.item() == pytest.approx(0.5 * 0.5 * (1.8**2 + 1))
    assert values.grad is not None and values.grad.tolist() == [[0, pytest.approx(0.5)]]
    assert [float(part) for part in found.metrics["val/clipfrac_avg"]] == [1, 2]


def test_the_score_stands_at_the_last_learnt_token() -> None:
    """Not one further (trl 3750), nor at a token of the environment. A sample that is dropped has no reward at all."""
    mask = torch.tensor([[F, T, T, F, F], [T, F, T, T, F], [F, F, F, F, F], [T, T, F, F, F]])
    logps, reference = torch.full((4, 5), -1.0), torch.full((4, 5), -3.0)
    scores = torch.tensor([10.0, 20, 30, float("nan")])
    found = token_rewards(scores, logps, reference, mask, 0.5)
    assert found.tolist() == [[0, -1, 9, 0, 0], [-1, 0, -1, 19, 0], [0] * 5, [0] * 5]
    assert token_rewards(scores, logps, None, mask, 0.5)[:2].tolist() == [[0, 0, 10, 0, 0], [0, 0, 0, 20, 0]]


def by_threads(work: Callable[[int, Any], Tensor], ranks: int) -> list[Tensor]:
    """`work(rank, all_reduce)` of each rank."""
    barrier, given = threading.Barrier(ranks), dict[int, Tensor]()
    results = dict[int, Tensor]()

    def run(rank: int) -> None:
        def all_reduce(value: Tensor) -> Tensor:
            given[rank] = value
            barrier.wait()
            total = torch.stack([given[i] for i in range(ranks)]).sum(0)
            barrier.wait()
            return total

        results[rank] = work(rank, all_reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(ranks)]


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_of_the_tokens_of_all_ranks(shift_mean: bool) -> None:
    case = make_case()
    picked = case.advantages[case.mask]
    wanted = (picked - picked.mean()) / (picked.var() + 1e-8).sqrt() + (0 if shift_mean else picked.mean())
    parts = [slice(0, 1), slice(1, 4), slice(4, 4)]
    found = torch.cat(
        by_threads(
            lambda i, reduce: whiten(case.advantages[parts[i]], case.mask[parts[i]], reduce, shift_mean=shift_mean), 3
        )
    )
    assert (found[case.mask] - wanted).abs().max() < 1e-5 and not found[~case.mask].any()
    alone = torch.cat([whiten(case.advantages[part], case.mask[part], lambda value: value) for part in parts[:2]])
    assert (alone[case.mask] - wanted).abs().max() > 1e-2  # what a local mean and variance would give


def test_whitening_of_nothing_and_of_equals_is_nothing() -> None:
    for mask in (torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)):
        assert not whiten(torch.full((2, 3), 0.1), mask, lambda value: value).any()


# ---- beside a second implementation

GAMMA, LAM, KL = 0.9, 0.8, 0.1


@dataclass
class Case:
    """(B, places); in the first two samples an environment wrote in between, and of the last nothing is learnt."""

    mask: Tensor
    logps: Tensor
    old: Tensor
    reference: Tensor
    values: Tensor
    old_values: Tensor
    scores: Tensor
    advantages: Tensor
    returns: Tensor


def make_case() -> Case:
    generator = torch.Generator().manual_seed(5)
    mask = torch.tensor([[F, T, T, F, F, T, T], [T, F, T, T, T, F, F], [F, F, T, F, F, F, F], [F] * 7])

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(mask.shape, generator=generator)

    logps, values = normal() - 2, normal()
    # Garbage where nothing is learnt, but what `token_logps` and a value model give there.
    old, old_values = logps + normal(0.4), values + normal(0.4)
    case = Case(
        mask, (logps * mask).requires_grad_(), old, old + normal(), values.requires_grad_(), old_values,
        torch.randn(4, generator=generator), normal(), normal(),
    )  # fmt: skip
    rewards = token_rewards(case.scores, old, case.reference, mask, KL)
    advantages, returns = gae(rewards, old_values, mask, GAMMA, LAM)
    return replace(case, advantages=whiten(advantages, mask, lambda value: value), returns=returns)


def by_token(case: Case) -> tuple[Tensor, dict[str, float]]:
    """The loss of `make_case`, of lists of the learnt tokens of each sample."""
    tokens: list[tuple[int, int]] = []
    plain, returns = [], []
    for sample in range(len(case.mask)):
        places = [t for t in range(case.mask.shape[1]) if case.mask[sample, t]]
        rewards = [-KL * float(case.old[sample, t] - case.reference[sample, t]) for t in places]
        if places:
            rewards[-1] += float(case.scores[sample])
        values = [float(case.old_values[sample, t]) for t in places] + [0.0]
        deltas = [reward + GAMMA * values[i + 1] - values[i] for i, reward in enumerate(rewards)]
        for i, t in enumerate(places):
            advantage = sum((GAMMA * LAM) ** k * delta for k, delta in enumerate(deltas[i:]))
            tokens.append((sample, t))
            plain.append(advantage)
            returns.append(advantage + values[i])
    white = torch.tensor(plain)
    white = (white - white.mean()) / (white.var() + 1e-8).sqrt()
    policy, value, kls, clipped, value_clipped = [], [], [], 0, 0
    for (sample, t), advantage, wanted in zip(tokens, white, returns, strict=True):
        difference = case.logps[sample, t] - case.old[sample, t]
        ratio, v, old = difference.exp(), case.values[sample, t], float(case.old_values[sample, t])
        losses = -ratio * advantage, -ratio.clamp(0.7, 1.3) * advantage
        errors = (v - wanted) ** 2, (v.clamp(old - 0.25, old + 0.25) - wanted) ** 2
        policy.append(torch.max(*losses))
        value.append(0.5 * torch.max(*errors))
        kls.append(0.5 * difference**2)
        clipped += bool(losses[1] > losses[0])
        value_clipped += bool(errors[1] > errors[0])
    policy_mean, value_mean = torch.stack(policy).mean(), torch.stack(value).mean()
    metrics = {
        "policy/approxkl_avg": torch.stack(kls).mean().item(),
        "policy/clipfrac_avg": clipped / len(tokens),
        "val/clipfrac_avg": value_clipped / len(tokens),
        "loss/policy_avg": policy_mean.item(),
        "loss/value_avg": value_mean.item(),
    }
    return policy_mean + 0.2 * value_mean, metrics


def ours(case: Case, parts: int = 1, *, local: bool = False) -> Loss:
    settings = PpoSection.model_construct(epsilon=0.3, cliprange_value=0.25, vf_coef=0.2)
    algorithm, found = make_policy_algorithm(settings), Loss(torch.zeros(()))
    for rows in torch.arange(len(case.mask)).chunk(parts):
        batch = batch_of(case.advantages[rows], case.old[rows], case.old_values[rows], case.returns[rows])
        loss = algorithm.loss(case.logps[rows], case.mask[rows], batch, case.values[rows])
        tokens = int(case.mask[rows].sum()) * parts if local else int(case.mask.sum())
        found = Loss(found.sum + loss.sum / algorithm.divisor(Update(len(rows), tokens, parts)), loss.metrics)
    return found


def apart(case: Case, found: Tensor, wanted: Tensor) -> tuple[float, float, float]:
    """(difference of the losses, the largest of the gradients, the mean of them)."""
    leaves = (case.logps, case.values)
    mine, other = (torch.cat(torch.autograd.grad(loss, leaves, retain_graph=True)) for loss in (found, wanted))
    return abs((found - wanted).item()), float((mine - other).abs().max()), float((mine - other).abs().mean())


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_formulas(parts: int) -> None:
    case = make_case()
    found, (wanted, metrics) = ours(case, parts), by_token(case)
    loss, largest, mean = apart(case, found.sum, wanted)
    assert loss < 1e-5 and largest < 1e-5 and mean < 1e-6
    if parts == 1:
        mine = {name: float(above / below) for name, (above, below) in found.metrics.items() if name != "val/ratio"}
        assert mine == {name: pytest.approx(value, abs=1e-6) for name, value in metrics.items()}


def wrong_case(wrong: str) -> Case:
    case = make_case()
    mask, alone = case.mask, lambda value: value
    rewards = token_rewards(case.scores, case.old, case.reference, mask, KL)
    values = case.old_values
    plain, returns = gae(rewards, values, mask, GAMMA, LAM)
    match wrong:
        case "tools are learnt":
            everything = mask.flip(1).cumsum(1).flip(1).bool() & mask.cumsum(1).bool()
            return replace(case, mask=everything)
        case "advantages through tools":
            through, returns = gae(rewards, values * mask, torch.ones_like(mask), GAMMA, LAM)
            return replace(case, advantages=whiten(through, mask, alone), returns=returns)
        case "returns after whitening":
            white = whiten(plain, mask, alone)
            return replace(case, returns=(white + values) * mask)
        case "not whitened":
            return replace(case, advantages=plain)
        case "score one token apart":
            last = (mask & (mask.flip(1).cumsum(1).flip(1) == 1)).int()
            moved = rewards + (last.roll(-1, 1) - last) * case.scores[:, None]
            plain, returns = gae(moved, values, mask, GAMMA, LAM)
            return replace(case, advantages=whiten(plain, mask, alone), returns=returns)
        case "k3 in the reward":
            d = case.reference - case.old
            off = rewards - mask * KL * (d + d.exp() - d - 1)
            plain, returns = gae(off, values, mask, GAMMA, LAM)
            return replace(case, advantages=whiten(plain, mask, alone), returns=returns)
        case _:
            return case


@pytest.mark.parametrize(
    "wrong",
    [
        "local means",
        "tools are learnt",
        "advantages through tools",
        "returns after whitening",
        "not whitened",
        "score one token apart",
        "k3 in the reward",
    ],
)
def test_a_wrong_variant_is_noticed(wrong: str) -> None:
    wanted, _ = by_token(right := make_case())
    gradients = torch.autograd.grad(wanted, (right.logps, right.values))
    case = wrong_case(wrong)
    found = ours(case, 2, local=wrong == "local means").sum
    others = torch.autograd.grad(found, (case.logps, case.values))
    mean = float((torch.cat(gradients) - torch.cat(others)).abs().mean())
    assert abs((found - wanted).item()) > 1e-3 or mean > 1e-4


def test_where_nothing_can_be_learnt_the_loss_is_zero_and_has_a_graph() -> None:
    case = replace(make_case(), mask=torch.zeros(4, 7, dtype=torch.bool))
    found = ours(case)
    gradients = torch.autograd.grad(found.sum, (case.logps, case.values))
    assert found.sum.item() == 0 and not any(gradient.any() for gradient in gradients)


def test_the_correction_for_the_engine_is_of_the_policy_alone() -> None:
    case = make_case()
    batch = batch_of(case.advantages, case.old, case.old_values, case.returns, engine_logps=case.old - 0.5)
    plain = Proximal().loss(case.logps, case.mask, batch, case.values)
    found = Proximal(importance_sampling_correction="token_truncate", importance_sampling_cap=1.5).loss(
        case.logps, case.mask, batch, case.values
    )
    assert found.metrics["loss/value_avg"] == plain.metrics["loss/value_avg"]
    assert float(found.metrics["loss/policy_avg"][0]) == pytest.approx(
        1.5 * float(plain.metrics["loss/policy_avg"][0]), rel=1e-5
    )
