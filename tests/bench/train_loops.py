"""What `rollout train sft` is measured against: the same training in a bare accelerate loop and by TRL's SFTTrainer.

`python train_loops.py JSON`: the keys of `Task`, and `loop`: "accelerate" or "trl". Prints {"tokens", "seconds"} of the
steps after the first `warm` ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """`batch` rows a step, of `words` words each. `threads`: of torch on the CPU."""

    model: str
    rows: str
    batch: int
    steps: int
    warm: int
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    lr: float = 1e-4
    max_length: int = 1024


def write_rows(path: Path, count: int, words: int, seed: int = 0) -> None:
    """Prompts with completions, nearly of one length, so that padding weighs on nobody."""
    luck = random.Random(seed)
    some = [
        "the",
        "worker",
        "gives",
        "result",
        "to",
        "coordinator",
        "and",
        "lease",
        "ends",
        "when",
        "answer",
        "is",
        "true",
        "12",
        "56",
        "one",
        "of",
    ]

    def text(number: int) -> str:
        return " ".join(luck.choices(some, k=number))

    lines = [{"prompt": text(words // 4), "completion": " " + text(words - words // 4)} for _ in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def environment(threads: int) -> dict[str, str]:
    """Of both sides: what ours sets for its own processes, as far as speed depends on it."""
    count = str(threads)
    return os.environ | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "HF_HUB_OFFLINE": "1"}


def accelerate_loop(task: Task) -> JsonObject:
    """As the examples of accelerate have it: loss by the model, AdamW, cosine, clipping, a line of metrics a step."""
    import torch
    from accelerate import Accelerator
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

    tokenizer: Any = AutoTokenizer.from_pretrained(task.model)
    rows = [json.loads(line) for line in Path(task.rows).read_text().splitlines()]

    def encoded(row: JsonObject) -> JsonObject:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        return {"ids": prompt + completion, "labels": [-100] * len(prompt) + completion}

    def collated(batch: list[JsonObject]) -> JsonObject:
        ids = [torch.tensor(one["ids"][: task.max_length]) for one in batch]
        labels = [torch.tensor(one["labels"][: task.max_length]) for one in batch]
        mask = [torch.ones_like(one) for one in ids]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            "attention_mask": pad_sequence(mask, batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    accelerator = Accelerator(cpu=task.device == "cpu", mixed_precision="bf16" if task.precision == "bf16" else "no")
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=0.0, fused=True)
    schedule = get_scheduler("cosine", optimizer, 0, task.steps)
    loader = DataLoader([encoded(row) for row in rows], task.batch, shuffle=True, collate_fn=collated, drop_last=True)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    step, tokens, began, lines = 0, 0, 0.0, []
    while step < task.steps:
        for batch in loader:
            if step == task.warm:
                tokens, began = 0, _now(task)
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            norm: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            tokens += int(batch["attention_mask"].sum())
            lines.append({"loss": float(loss.detach()), "grad_norm": float(norm), "lr": schedule.get_last_lr()[0]})
            step += 1
            if step == task.steps:
                break
    return {"tokens": tokens, "seconds": _now(task) - began}


def trl_loop(task: Task) -> JsonObject:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    rows = [json.loads(line) for line in Path(task.rows).read_text().splitlines()]
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer: Any = AutoTokenizer.from_pretrained(task.model)

    class Clock(TrainerCallback):
        began = ended = 0.0
        tokens = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == task.warm:
                self.tokens, self.began = state.num_input_tokens_seen, _now(task)

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.ended, self.tokens = _now(task), state.num_input_tokens_seen - self.tokens

    arguments = trl.SFTConfig(  # pyright: ignore[reportPrivateImportUsage]
        output_dir=str(Path(task.rows).parent / "trl"), report_to="none", use_cpu=task.device == "cpu",
        bf16=task.precision == "bf16", gradient_checkpointing=False, per_device_train_batch_size=task.batch,
        max_length=task.max_length, max_steps=task.steps, learning_rate=task.lr, lr_scheduler_type="cosine",
        optim="adamw_torch_fused", max_grad_norm=1.0, weight_decay=0.0, save_strategy="no", logging_steps=1,
        include_num_input_tokens_seen="non_padding", dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer: Any = trl.SFTTrainer(  # pyright: ignore[reportPrivateImportUsage]
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return {"tokens": int(clock.tokens), "seconds": clock.ended - clock.began}


def _now(task: Task) -> float:
    if task.device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


LOOPS = {"accelerate": accelerate_loop, "trl": trl_loop}


def command(loop: str, task: Task) -> list[str]:
    return [sys.executable, __file__, json.dumps({"loop": loop, **asdict(task)})]


if __name__ == "__main__":
    import torch

    given = json.loads(sys.argv[1])
    chosen = LOOPS[given.pop("loop")]
    asked = Task(**given)
    torch.set_num_threads(asked.threads)
    torch.set_float32_matmul_precision("highest")
    print(json.dumps(chosen(asked)))
