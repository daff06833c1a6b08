"""Weights and optimiser of the trained model, in full and under the names in files, and back.

The form of a snapshot does not depend on the number of processes that share them.
"""

from __future__ import annotations

import re
from typing import Any

from rollout.model.errors import ObjectCorruptError
from torch import Tensor, nn

from rollout_worker.backends.training.parallel import share_of, whole
from rollout_worker.backends.training.state import plain

_ADAPTER_NAME = re.compile(r"\.default(?=\.|$)")


def names(model: Any) -> dict[str, str]:
    """Map names in the model to names in files, for the weights in a snapshot: all of a model, but only an adapter's.

    peft's files leave out the adapter's name; of tied weights, the second name is left out.
    """
    if hasattr(model, "peft_config"):
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {
            name: _ADAPTER_NAME.sub("", name.replace(".modules_to_save.default.", "."))
            for name in model.state_dict()
            if name in trained
        }
    tied: Any = (getattr(model, "_tied_weights_keys", None) or ()) if _ties(model.config) else ()
    return {name: name for name in model.state_dict() if name not in set(tied)}


def _ties(config: Any) -> bool:
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False) or config.tie_word_embeddings)


def capture_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return full weights on the CPU. All processes call it at once; those that do not `keep` them get nothing."""
    state = model.state_dict()
    found: dict[str, Tensor] = {}
    for name, file_name in names(model).items():
        value = whole(state[name])
        if keep:
            found[file_name] = plain(value)
    return found


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights. Raises ObjectCorruptError if they are of another model."""
    state, wanted = model.state_dict(), names(model)
    other = sorted(wanted.values() ^ weights.keys()) or sorted(
        file_name for name, file_name in wanted.items() if state[name].shape != weights[file_name].shape
    )
    if other:
        raise ObjectCorruptError(f"the snapshot is of another model: it differs in {', '.join(other[:3])}")
    given = {name: share_of(weights[file_name], state[name]) for name, file_name in wanted.items()}
    model.load_state_dict(given, strict=False)


def whole_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state_dict()` of a torch optimiser with full tensors. All processes call it at once."""
    found = {
        index: {key: whole(value) if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": found}


def shared_optimizer(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Reverse `whole_optimizer`: return what this process holds, for an optimiser with these parameters.

    Raises ObjectCorruptError if it is of another model.
    """
    parameters: list[Any] = [parameter for group in groups for parameter in group["params"]]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group["params"]) for group in groups]:
        raise ObjectCorruptError("the snapshot's optimiser is of another model: it has other parameters")
    found: dict[int, dict[str, Any]] = {
        index: {
            key: share_of(value, parameters[index]) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {**state, "state": found}
