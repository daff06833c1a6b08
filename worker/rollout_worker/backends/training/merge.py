"""`python -m rollout_worker.backends.training.merge ADAPTER BASE DIRECTORY`: merges an adapter and its base to one
model."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from rollout_worker.backends.training.models import merge_adapter


def main(adapter: str, base: str, directory: str) -> None:
    models: Any = transformers.AutoModelForCausalLM
    # In float32, as it was trained: of a base in half precision sums would lose what was learnt.
    merge_adapter(models.from_pretrained(base, dtype=torch.float32), adapter).save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
