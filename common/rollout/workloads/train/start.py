"""A run that starts from the state of another: what may differ between the two, and what must not.

Data, learning rate, schedule, seed, budget and everything else may differ: the state consists of the model, its
optimiser, the generators and the position, and continues under the settings of the new run. Steps are counted on. With
the settings of the old run, the new one ends in the same bytes.
"""

from __future__ import annotations

from typing import Any, cast

from rollout.model.errors import ConfigError
from rollout.workloads.json_form import JsonObject
from rollout.workloads.port import FoundSnapshot
from rollout.workloads.train.config import TrainConfig
from rollout.workloads.train.segment import NO_ROLLOUTS

_SAME = (
    ("optimizer.kind", "the optimiser's state is of another kind"),
    ("lora.r", "the adapter has another shape"),
    ("lora.target_modules", "the adapter has other layers"),
    ("value", "what values come from is another model"),
    ("devices", "each process has generators of its own"),
)
"""Settings of the algorithm that must be the same, and why."""


def start_table(settings: TrainConfig) -> JsonObject | None:
    """Return `start` of a run's configuration. `before` gets the fields of the result to continue once it is found."""
    if settings.start is None:
        return None
    before = {"step": settings.start.step or 0}
    return {**settings.start.model_dump(mode="json"), "snapshot": "", "content_id": "", "before": before}


def begin_with(config: JsonObject, found: FoundSnapshot) -> None:
    """Put the state `found` into `start` of a run's configuration. Raises ConfigError with everything that does not
    fit."""
    old, result = found.config, found.result
    where = f"start: run {found.run_id[-8:]} cannot be gone on with here"
    kind, former = config["algorithm"]["kind"], old["algorithm"]["kind"]
    if kind != former:
        raise ConfigError(f"{where}: it is {former}, and this is {kind}: the state of one is none of the other")
    faults: list[str] = []
    if config["model"]["content_id"] != old["model"]["content_id"]:
        faults.append(
            f"algorithm.{kind}.base_model.uri: its base model is {old['model']['uri']}, and this is another, "
            f"{config['model']['uri']}: name the same one; the weights come from the snapshot"
        )
    before, after = old["algorithm"]["settings"], config["algorithm"]["settings"]
    for key, why in _SAME:
        was, now = _at(before, key), _at(after, key)
        if was != now:
            faults.append(f"algorithm.{kind}.{key}: it was {_shown(was)} and is {_shown(now)} now: {why}")
    if result["step"] >= config["steps"]:
        faults.append(
            f"algorithm.{kind}.budget: step {result['step']} is done, and this run has {config['steps']} steps, "
            "counted from the first step of all: give it more"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    config["start"]["before"] = {
        "step": result["step"],
        "snapshot": found.id,
        "stopping": result["stopping"],
        "fingerprint": result["fingerprint"],
    }
    drawn: JsonObject = result.get("rollouts") or {}
    if drawn.get("objects"):  # of versions of the policy: samples are drawn by one that is `lag` behind
        kept = {name: drawn[name] for name in ("versions", "objects")}
        config["start"]["before"]["rollouts"] = {**NO_ROLLOUTS, **kept}


def _at(settings: JsonObject, key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = cast(JsonObject, value).get(part) if isinstance(value, dict) else None
    return value


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)
