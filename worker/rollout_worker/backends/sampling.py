"""Chooses the next token of every row of a batch. A row's choice depends only on its own scores and random numbers.

Shapes: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_worker.backends.port import Sampling


@dataclass(slots=True)
class RowState:
    """The state of a row for sampling. `constraint` masks scores (structured output); `banned` tokens are never
    chosen."""

    sampling: Sampling
    prompt: list[int]
    generated: list[int]
    draws: random.Random
    eos: frozenset[int]
    constraint: Any = None
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    id_logprobs: list[float] = field(default_factory=list[float])


def next_tokens(logits_BV: Any, rows: Sequence[RowState]) -> list[int]:
    """Return one token id per row. `logits_BV` are float32 and changed in place."""
    import torch

    for index, row in enumerate(rows):
        _adjust(logits_BV[index], row)
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    sampled = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
    if sampled:
        chosen_rows = [rows[index] for index in sampled]
        scores_BV = (
            logits_BV if len(sampled) == len(rows) else logits_BV[torch.tensor(sampled, device=logits_BV.device)]
        )
        for index, token in zip(sampled, _sample(scores_BV, chosen_rows), strict=True):
            tokens[index] = token
    return tokens


def _adjust(scores_V: Any, row: RowState) -> None:
    """Apply allowed tokens, biases, penalties, minimum length and structure, in this order (that of vLLM)."""
    import torch

    sampling = row.sampling
    if sampling.allowed_ids:
        allowed = torch.tensor(sampling.allowed_ids, device=scores_V.device)
        kept = scores_V[allowed]
        scores_V.fill_(float("-inf"))
        scores_V[allowed] = kept
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=scores_V.device)
        scores_V[biased] += torch.tensor(list(sampling.logit_bias.values()), device=scores_V.device)
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.generated}), device=scores_V.device)
        values = scores_V[seen]
        penalty = sampling.repetition_penalty
        scores_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.generated and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(row.generated)
        penalties = [sampling.presence_penalty + sampling.frequency_penalty * count for count in counts.values()]
        scores_V[torch.tensor(list(counts), device=scores_V.device)] -= torch.tensor(penalties, device=scores_V.device)
    if len(row.generated) < sampling.min_tokens:
        scores_V[torch.tensor(sorted(row.eos), device=scores_V.device)] = float("-inf")
    if row.constraint is not None:
        row.constraint.mask(scores_V)


def _sample(scores_BV: Any, rows: Sequence[RowState]) -> list[int]:
    """Apply temperature, min-p, top-k and top-p, then invert the cumulative distribution at each row's random
    number."""
    import torch

    device = scores_BV.device

    def column(values: Sequence[float]) -> Any:
        return torch.tensor(values, device=device, dtype=torch.float32)[:, None]

    probs_BV = (scores_BV / column([row.sampling.temperature for row in rows])).softmax(dim=-1)
    # Sorted, so that cutting keeps a prefix and a draw of 0 gives the most probable token.
    probs_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    keep_BV = probs_BV >= column([row.sampling.min_p for row in rows]) * probs_BV[:, :1]
    size = probs_BV.shape[-1]
    top_k = column([row.sampling.top_k if row.sampling.top_k > 0 else size for row in rows])
    keep_BV &= torch.arange(size, device=device)[None, :] < top_k
    probs_BV = torch.where(keep_BV, probs_BV, 0.0)
    probs_BV = probs_BV / probs_BV.sum(dim=-1, keepdim=True)
    top_p = column([row.sampling.top_p for row in rows])
    # A token stays if what stands before it does not reach top_p yet; the first always stays.
    probs_BV = torch.where(((probs_BV.cumsum(dim=-1) - probs_BV) < top_p) | (top_p >= 1), probs_BV, 0.0)
    # Double precision: over a large vocabulary single precision would make the tail unreachable.
    cumulative_BV = probs_BV.double().cumsum(dim=-1)
    draws = torch.tensor([row.draws.random() for row in rows], device=device, dtype=torch.float64)[:, None]
    places = torch.searchsorted(cumulative_BV, draws * cumulative_BV[:, -1:], right=True)
    last = (probs_BV > 0).sum(dim=-1, keepdim=True) - 1
    return order_BV.gather(1, torch.minimum(places, last)).squeeze(1).tolist()


def drawn_logprobs(logits_BV: Any, tokens: list[int], temperatures: list[float]) -> list[float]:
    """Return Choice.id_logprobs of one token per row, from the model's own scores."""
    import torch

    divisors = torch.tensor([value or 1.0 for value in temperatures], device=logits_BV.device)[:, None]
    chosen = torch.tensor(tokens, device=logits_BV.device)[:, None]
    return (logits_BV / divisors).log_softmax(dim=-1).gather(1, chosen).squeeze(1).tolist()


def token_logprobs(logits_V: Any, token: int, top: int, name: Any) -> dict[str, Any]:
    """Return an entry of Choice.logprobs from the model's own scores, before penalties and temperature."""
    logprobs_V = logits_V.log_softmax(dim=-1)
    alternatives: list[dict[str, Any]] = []
    if top:
        values, ids = logprobs_V.topk(top)
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        alternatives = [{"token": name(other), "logprob": value} for other, value in pairs]
    return {"token": name(token), "logprob": float(logprobs_V[token]), "top": alternatives}
