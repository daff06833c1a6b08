"""A few rows with the trainer's outputs, which a snapshot keeps, to check that an export computes the same.

`python -m rollout_worker.backends.training.probe STATE DIRECTORY BASE`: STATE is an unpacked snapshot, DIRECTORY its
export, BASE the model of an adapter, or empty. The last line of the output is an object: `{}`, or `fault`, or
`unchecked` with the reason why there was nothing to compare.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from rollout.snapshots.export import ADAPTER, PROBE
from rollout.workloads.train.dataset import Dataset
from torch import Tensor

from rollout_worker.algorithms.port import Batch, token_logps
from rollout_worker.backends.training.collate import Collator, Tokens
from rollout_worker.backends.training.faults import of_its_input

ROWS, TOKENS = 4, 256
EXACT, ROUNDED = 1e-3, 5e-2
"""How much an export may differ, relative to the outputs: computed in float32, or in half precision, which flash
attention needs. On several devices, deep models differ by 1e-4 in float32; wrong exports by more than 0.1."""
TENSORS = "probe.safetensors"


@dataclass(frozen=True, slots=True)
class Probe:
    """`tensors` are ids, mask (rows, tokens) and outputs: for a language model (rows, tokens - 1) log-probabilities of
    the next token, for a reward model (rows,) scores. `about` describes the tokenizer, and has the tolerance."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def probe_batch(collator: Collator, *, whole: bool) -> Batch:
    """Return rows of several lengths, or the shortest if all are long. With `whole` they are not truncated, because a
    score belongs to the last token."""
    data: Dataset = collator.data
    lengths = np.diff(data.offsets)
    order = np.argsort(lengths, kind="stable")
    fitting = order[: max(1, int((lengths <= TOKENS).sum()))]
    chosen = sorted({int(fitting[place]) for place in np.linspace(0, len(fitting) - 1, ROWS).astype(int)})
    rows: list[Tokens] = []
    for one in chosen:
        ids, _, _ = data.sequence(one // data.width, one % data.width)
        ids = ids if whole else ids[:TOKENS]
        rows.append((ids, np.ones(len(ids), np.bool_)))
    return collator.padded(rows)


def probe(output: Tensor, batch: Batch, tokenizer: Any, tolerance: float) -> Probe:
    """Make a probe. `output` is logits (rows, tokens, vocabulary), or scores (rows,)."""
    values = token_logps(output, batch.labels)[0] if output.ndim == 3 else output.float()
    tensors = {"ids": batch.input_ids, "mask": batch.attention_mask, "outputs": values}
    text = str(tokenizer.decode(batch.input_ids[-1][batch.attention_mask[-1].bool()]))
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return Probe(plain, {"tolerance": tolerance, "text": text, "tokenizer": _facts(tokenizer, text)})


def _facts(tokenizer: Any, text: str) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "tokens of a text": _tokens(tokenizer, text),
        "chat template": tokenizer.chat_template,
        **{name.removesuffix("_id").replace("_", " "): getattr(tokenizer, name) for name in names},
    }


def _tokens(tokenizer: Any, text: str) -> list[int] | None:
    """Encode decoded text again. Returns None if that is impossible."""
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception as error:
        if not of_its_input(error):
            raise
        return None


def fault_of(state: Path, directory: Path, base: str) -> dict[str, str]:
    library: Any = safetensors.torch
    tensors: dict[str, Tensor] = library.load_file(state / TENSORS)
    about: dict[str, Any] = json.loads((state / PROBE).read_text("utf-8"))
    loader: Any = transformers.AutoTokenizer
    tokenizer = loader.from_pretrained(directory)
    facts = _facts(tokenizer, about["text"])
    if wrong := [name for name, value in about["tokenizer"].items() if facts[name] != value]:
        return {"fault": f"its tokenizer has another {', '.join(wrong)}"}
    adapter = (directory / ADAPTER).is_file()
    try:
        model = _model(directory, base if adapter else "", tokenizer, scored=tensors["outputs"].ndim == 1)
    except OSError as error:
        if not adapter:
            raise
        return {"unchecked": f"its base {base} is not on this host ({str(error).splitlines()[0]})"}
    with torch.no_grad():
        found = _outputs(model.eval(), tensors, tokenizer.pad_token_id)
    wanted = tensors["outputs"]
    there = tensors["mask"][:, 1:].bool() if wanted.ndim == 2 else torch.ones_like(wanted, dtype=torch.bool)
    difference = float((found - wanted).abs()[there].mean()) / max(1.0, float(wanted.abs()[there].mean()))
    if not difference <= about["tolerance"]:
        what = "log-probabilities" if wanted.ndim == 2 else "scores"
        return {"fault": f"its {what} differ from those of the trainer by {difference:.2g} of their size"}
    return {}


def _model(directory: Path, base: str, tokenizer: Any, *, scored: bool) -> Any:
    kind: Any = transformers.AutoModelForSequenceClassification if scored else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch.float32}
    if not base:
        return kind.from_pretrained(directory, **options)
    if scored:
        options |= {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    adapters: Any = import_module("peft").PeftModel
    return adapters.from_pretrained(kind.from_pretrained(base, **options), str(directory))


def _outputs(model: Any, tensors: dict[str, Tensor], pad: int | None) -> Tensor:
    ids, mask = tensors["ids"], tensors["mask"]
    if tensors["outputs"].ndim == 2:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return token_logps(logits, ids)[0]
    if pad is not None:
        return model(input_ids=torch.where(mask.bool(), ids, pad), attention_mask=mask).logits[:, 0].float()
    rows = [model(input_ids=row[None, : int(of.sum())]).logits[0, 0] for row, of in zip(ids, mask, strict=True)]
    return torch.stack(rows).float()


def main(state: str, directory: str, base: str) -> None:
    sys.stdout.write(json.dumps(fault_of(Path(state), Path(directory), base)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
