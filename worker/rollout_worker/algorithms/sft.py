"""Supervised fine-tuning: the negative log-likelihood of the supervised tokens.

    L = - sum over supervised tokens t of log p(t | what stands before it)  /  N

N is the number of supervised tokens of the *whole* step: all micro-batches of the accumulation, all ranks. (With a mean
per micro-batch instead, tokens of short rows weigh more: huggingface/transformers issue 34191.)
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from rollout_worker.algorithms.port import Algorithm, Batch, Loss, Models, token_logps


class SupervisedFineTuning(Algorithm):
    name: ClassVar[str] = "sft"
    rows: ClassVar[Literal["text", "pairs", "unpaired"]] = "text"
    per_token: ClassVar[bool] = True

    def loss(self, models: Models, batch: Batch) -> Loss:
        logits = models.policy(batch)
        logps, mask = token_logps(logits, batch.labels)
        count = mask.sum().float()
        with torch.no_grad():
            right = (logits.argmax(-1)[:, :-1] == batch.labels[:, 1:]) & mask
        return Loss(-logps.sum(), {"mean_token_accuracy": (right.sum().float(), count)})
