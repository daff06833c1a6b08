"""Rewards that are code, in TRL's form: `f(prompts, completions, completion_ids, **columns)`.

They run in the process of the user's functions, which restarts after every crash, and so import next to nothing.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Awaitable, Callable
from copy import deepcopy
from types import TracebackType
from typing import Any, cast


class RewardError(Exception):
    """A reward is unavailable. `retry` says that a retry may help."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


def score(row: dict[str, Any]) -> Any:
    """Return rewards by function and completion: a number, or None if the function does not judge it.

    With asynchronous functions, which run concurrently, it returns an awaitable of that. Raises RewardError, which
    names the function and the completion.
    """
    functions = [(name, _callable(name)) for name in row["functions"]]
    if row.get("load_only"):
        return []
    given: list[Any] = []
    try:
        for name, function in functions:
            own = deepcopy(row) if len(functions) > 1 else row  # a function may change what it is given
            given.append(_call(name, function, own))
    except RewardError:
        for one in given:
            if hasattr(one, "close"):  # nobody will wait for it
                one.close()
        raise
    if any(isinstance(one, Awaitable) for one in given):
        return _awaited(row, given)
    return [_checked(name, one, len(row["completions"])) for name, one in zip(row["functions"], given, strict=True)]


_OURS = (__file__, os.path.join(os.path.dirname(__file__), "environments.py"))  # noqa: PTH118, PTH120 - as above
_loaded: dict[str, Callable[..., Any]] = {}


def _callable(target: str) -> Callable[..., Any]:
    """Return what `target` names; of a class, an instance that is made once per process."""
    if target in _loaded:
        return _loaded[target]
    found = load(target, "reward", made=True)
    if not callable(found):
        raise RewardError(f"reward {target} is a {type(found).__name__}, which cannot be called")
    return _loaded.setdefault(target, found)


def load(target: str, what: str, *, made: bool) -> Any:
    """Import `target`, module:name. `made` returns an instance of a class. Raises RewardError if it is unavailable."""
    module, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found() if made and isinstance(found, type) else found
    except Exception as error:  # noqa: BLE001 - the user's module
        place = _place(error.__traceback__)
        fault = RewardError(f"{what} {target} cannot be loaded: {place}{type(error).__name__}: {error}")
        fault.retry = getattr(error, "retry", False) is True
        raise fault.with_traceback(error.__traceback__) from None


def _place(traceback: TracebackType | None) -> str:
    """Return `file:line: ` of the user's code where the traceback ends, or an empty string."""
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file not in _OURS and not file.startswith("<frozen") and "importlib" not in file:
            root = max((one for one in sys.path if one and file.startswith(one)), key=len, default="")
            place = f"{file[len(root) :].lstrip(os.sep)}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return place


def _call(name: str, function: Callable[..., Any], row: dict[str, Any]) -> Any:
    """Call a function as TRL does: every column is a list with as many values as there are completions."""
    texts, prompt = row["completions"], row["prompt"]
    chat = isinstance(prompt, list)
    completions: list[Any] = [_turns(text) for text in texts] if chat else list(texts)
    columns = {key: [value] * len(texts) for key, value in row["columns"].items()}
    given = {"prompts": [prompt] * len(texts), "completions": completions, "completion_ids": row["completion_ids"]}
    try:
        return function(**given, **columns)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's function
        raise raised(f"reward {name}", error) from None


def _turns(completion: Any) -> list[dict[str, Any]]:
    """Return the messages of a completion; a conversation with an environment already consists of messages."""
    said = [{"role": "assistant", "content": completion}]
    return cast("list[Any]", completion) if isinstance(completion, list) else said


async def _awaited(row: dict[str, Any], given: list[Any]) -> list[list[float | None]]:
    import asyncio  # only for functions that need it: it is a third of the process's start

    async def one(name: str, found: Any) -> list[float | None]:
        try:
            values = await cast("Awaitable[Any]", found) if isinstance(found, Awaitable) else found
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise raised(f"reward {name}", error) from None
        return _checked(name, values, len(row["completions"]))

    names: list[str] = row["functions"]
    return await asyncio.gather(*(one(name, found) for name, found in zip(names, given, strict=True)))


def raised(what: str, error: Exception) -> RewardError:
    """Return an error with the traceback of `error`, which the user's code raised."""
    text = f"{what} raised {type(error).__name__}: {_place(error.__traceback__)}{error}"
    return RewardError(text, retry=getattr(error, "retry", True) is not False).with_traceback(error.__traceback__)


def _checked(name: str, found: Any, count: int) -> list[float | None]:
    if isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
        shape = "a list of numbers, one of each completion"
        raise RewardError(f"reward {name} returned {shown(found)}, and not {shape}")
    values: list[Any] = list(found)
    if len(values) != count:
        raise RewardError(f"reward {name} returned {len(values)} values for {count} completions: one of each is needed")
    return [number(f"reward {name}, completion {place}", value) for place, value in enumerate(values, 1)]


def number(what: str, value: Any) -> float | None:
    """Return any library's number as a float. Raises RewardError for other values; `what` says where the value comes
    from."""
    if value is None:
        return None
    if not hasattr(value, "__float__"):
        raise RewardError(f"{what}: {shown(value)} is no number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RewardError(f"{what}: {shown(value)} is no number: {error}") from error
    if not math.isfinite(found):
        raise RewardError(f"{what}: {found} is no reward: return None for no judgement")
    return found


def shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.100}"
