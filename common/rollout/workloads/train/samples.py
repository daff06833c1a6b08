"""samples.jsonl: the policy's samples and their rewards. Each segment of reinforcement learning leaves an object with a
line for each sample, in order, which this module reads, checks and writes again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from rollout.workloads.json_form import JsonObject, dump_line, field_in, object_in, parse_result

SAMPLES = "samples.jsonl"
ONLINE = frozenset({"grpo", "ppo"})
"""Algorithms that train on the policy's own samples."""
_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "group": (int,),
    "number": (int,),
    "prompt": (str, list),
    "completion": (str,),
    "completion_ids": (list,),
    "rewards": (dict,),
    "reward": (float, int, NoneType),
    "advantage": (float, int, NoneType),
    "policy_version": (int,),
    "finish_reason": (str,),
}


def read_samples(path: Path) -> Iterator[JsonObject]:
    """Yield the samples of a segment. Raises InvalidResultError if a line is invalid."""
    with path.open("rb") as file:
        for line in file:
            yield _sample(parse_result(line))


def rewrite_samples(source: Path, target: Path) -> None:
    """Parse the lines and encode them anew. If it raises InvalidResultError, `target` is incomplete."""
    with target.open("wb") as file:
        file.writelines(map(dump_line, read_samples(source)))


def _sample(value: Any) -> JsonObject:
    fields = object_in(value, "a sample")
    known: JsonObject = {name: field_in(fields, name, *types) for name, types in _FIELDS.items()}
    for name in known["rewards"]:
        field_in(known["rewards"], name, float, int, NoneType)
    return known | {name: fields[name] for name in fields if name not in known}


def sample_lines(sample: JsonObject) -> list[str]:
    """Format one sample."""
    parts = [f"step {sample['step']}", f"group {sample['group']}", f"row {sample['number']}"]
    parts += [f"reward {_figure(sample['reward'])}", f"advantage {_figure(sample['advantage'], '+')}"]
    parts += [f"version {sample['policy_version']}", f"{len(sample['completion_ids']):,} tokens"]
    parts += ["cut off"] if sample["finish_reason"] == "length" else []
    rewards = ", ".join(f"{name} {_figure(value)}" for name, value in sample["rewards"].items())
    lines = [" · ".join(parts)] + ([f"  rewards     {rewards}"] if len(sample["rewards"]) > 1 else [])
    lines += [f"  no reward   {sample['reward_fault']}"] if "reward_fault" in sample else []
    return [*lines, *_text("prompt", sample["prompt"]), *_text("completion", sample["completion"])]


def _figure(value: float | None, sign: str = "") -> str:
    return "none" if value is None else f"{value:{sign}.3f}"


def _text(what: str, value: str | list[Any]) -> Iterator[str]:
    """Yield a text, or messages, each line after its label."""
    messages = [value] if isinstance(value, str) else [_message(one) for one in value]
    for number, line in enumerate("\n".join(messages).split("\n")):
        yield f"  {'' if number else what:<11} {line}"


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return f"{message.get('role')}: {content}"  # pyright: ignore[reportUnknownMemberType]
