"""TRL's names of keys, so that its users can paste a configuration: one table, shown in the documentation.

They stand in `[algorithm.KIND]`, as TRL's arguments stand beside each other. A key that is given under both names is a
fault.
"""

from __future__ import annotations

from typing import Any, cast

ALIASES: dict[str, str] = {
    "model_name_or_path": "base_model.uri",
    "model_revision": "base_model.revision",
    "per_device_train_batch_size": "minibatch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "num_train_epochs": "budget.epochs",
    "max_steps": "budget.max_steps",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_ratio",
    "max_grad_norm": "optimizer.max_grad_norm",
    "center_rewards_coefficient": "centre",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "torch_compile": "compile",
    "attn_implementation": "attention",
    "eval_steps": "eval.every_steps",
}
"""TRL's name -> ours, where only the name differs."""

MEANINGS: dict[str, str] = {
    "bf16": 'true: precision = "bf16"; false: "fp32"',
    "packing": 'true: packing.kind = "best_fit"; false: "off"',
    "completion_only_loss": 'true: loss_on.kind = "completion_only"; false: "all"',
    "assistant_only_loss": 'true: loss_on.kind = "assistant_only"',
    "adam_beta1": "optimizer.betas, the first",
    "adam_beta2": "optimizer.betas, the second",
    "optim": 'optimizer.kind: adamw_torch is "adamw", sgd is "sgd"',
}
"""TRL's name -> what becomes of it, where the value differs too."""

_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}


def translated(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of `[algorithm.KIND]` under our names. ValueError: the same thing is said twice."""
    known = ALIASES.keys() | MEANINGS.keys()
    if not known & values.keys():
        return values
    result = {key: value for key, value in values.items() if key not in known or isinstance(value, dict)}
    for name, value in values.items():
        if name in result:
            continue
        if name in ALIASES:
            _put(result, ALIASES[name], value, name)
        else:
            _translate(result, name, value)
    return result


def _translate(result: dict[str, Any], name: str, value: Any) -> None:
    if name in ("adam_beta1", "adam_beta2"):
        optimizer = _table(result, "optimizer")
        betas = list(optimizer.get("betas", (0.9, 0.999)))
        betas[name == "adam_beta2"] = value
        optimizer["betas"] = betas
    elif name == "optim":
        _put(result, "optimizer.kind", _OPTIMIZERS.get(value, value), name)
    elif name == "bf16":
        _put(result, "precision", "bf16" if value else "fp32", name)
    elif name == "packing":
        _put(result, "packing.kind", "best_fit" if value else "off", name)
    elif name == "completion_only_loss":
        _put(result, "loss_on.kind", "completion_only" if value else "all", name)
    elif value:
        _put(result, "loss_on.kind", "assistant_only", name)


def _put(result: dict[str, Any], place: str, value: Any, name: str) -> None:
    *tables, key = place.split(".")
    table = result
    for one in tables:
        table = _table(table, one)
    if key in table:
        raise ValueError(f"{name} is TRL's name of {place}, which is given too: keep one of them")
    table[key] = value


def _table(values: dict[str, Any], key: str) -> dict[str, Any]:
    """A copy of the table `key`, put into `values`: what was given stays as it is."""
    found = values.get(key)
    values[key] = table = dict(cast("dict[str, Any]", found)) if isinstance(found, dict) else {}
    return table
