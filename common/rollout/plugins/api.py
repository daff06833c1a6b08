"""The interface for authors: plain functions and classes, without an event loop, a GPU or a running cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from rollout.model.errors import PluginError

F = TypeVar("F", bound=Callable[..., Any])

REWARD_MARK = "__rollout_reward__"
INIT, PREFLIGHT, SHUTDOWN = "rollout.init", "rollout.preflight", "rollout.shutdown"
"""Methods that the host calls itself; a plugin's own methods do not begin with `rollout.`."""
PROTOCOL_VERSION = 1
ABI_VERSION = 1


class Environment(Protocol):
    """Runs one episode at a time; the host makes one for each `episode_id` with the plugin's factory.

    `reset` returns the first observation, any JSON value. `step` returns a dict with `observation`, `reward` (a number
    or None) and `done`; `info` is optional. Methods may also be plain functions.
    """

    async def reset(self, task: Any, *, seed: int, episode_id: str) -> Any: ...
    async def step(self, action: Any, *, timeout_s: float) -> dict[str, Any]: ...
    def close(self) -> Any: ...


def reward(function: F) -> F:
    """Mark a function of a module as a reward, callable by its name.

    It takes keyword arguments and returns a float, None ("cannot say") or a dict of JSON values whose `reward`, if
    present, is a number or None. It may be async.
    """
    setattr(function, REWARD_MARK, True)
    return function


def is_reward(value: object) -> bool:
    return callable(value) and getattr(value, REWARD_MARK, False) is True


def check_result(kind: str, method: str, value: Any) -> Any:
    """Return `value` if a plugin of this kind may return it from `method`. Raises PluginError with reason
    "wrong_type"."""
    if kind == "reward":
        _check_reward(method, value)
    elif kind == "env-harness" and method == "step":
        if not isinstance(value, dict):
            raise _wrong(method, "a dict with observation, reward and done", value)
        fields = cast("dict[str, Any]", value)
        if "observation" not in fields or not isinstance(fields.get("done"), bool):
            raise _wrong(method, "a dict with an observation and a bool done", value)
        _check_number(method, fields.get("reward"))
    return cast("Any", value)


def _check_reward(method: str, value: Any) -> None:
    if isinstance(value, dict):
        _check_number(method, cast("dict[str, Any]", value).get("reward"))
    else:
        _check_number(method, value)


def _check_number(method: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(method, "a finite number, None or a dict", value)


def _wrong(method: str, wanted: str, value: Any) -> PluginError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return PluginError(f"{method} must return {wanted}, not {type(value).__name__} {shown}", reason="wrong_type")
