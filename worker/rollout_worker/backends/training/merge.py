"""`python -m rollout_worker.backends.training.merge ADAPTER BASE DIRECTORY`: an adapter and its base as one model."""

from __future__ import annotations

import sys
from typing import Any

from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(adapter: str, base: str, directory: str) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(base)
    model: Any = PeftModel.from_pretrained(whole, adapter)
    model.merge_and_unload().save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
