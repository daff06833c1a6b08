"""`python -m rollout_worker.backends.training.merge ADAPTER BASE DIRECTORY`: an adapter and its base as one model."""

from __future__ import annotations

import sys
from typing import Any

import peft
import transformers


def main(adapter: str, base: str, directory: str) -> None:
    models: Any = transformers.AutoModelForCausalLM
    adapters: Any = peft.PeftModel
    adapters.from_pretrained(models.from_pretrained(base), adapter).merge_and_unload().save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
