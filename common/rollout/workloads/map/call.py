"""What is called with each row: a function by name, and its arguments besides the row."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.model.errors import ConfigError
from rollout.workloads.code import check_callable
from rollout.workloads.json_form import JsonObject
from rollout.workloads.values import encode

ARGUMENTS_MAX = 64 << 10
"""Maximum size of the arguments, in bytes of JSON."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_ADVICE = "what is larger belongs into a file of the code, or the row says where it is"


@dataclass(frozen=True, slots=True)
class Call:
    """A function is called as `function(*before, row, *args, **kwargs)`. A class is created as `Class(*args,
    **kwargs)`, once in each process, and the instance is called with the row. All arguments are JSON values.

    `per_process` is the number of rows at once in a process; 0 lets the kind of function decide.
    """

    function: str
    before: Sequence[Any] = ()
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    per_process: int = 0

    def arguments(self) -> JsonObject:
        """Return the arguments as a run's configuration stores them; empty if there are none. Raises ConfigError if one
        is not JSON."""
        given = {"before": list(self.before), "args": list(self.args), "kwargs": dict(self.kwargs)}
        given = {name: value for name, value in given.items() if value}
        parts: list[bytes] = []
        for name, value in given.items():
            try:
                parts.append(encode(value, "args" if name == "before" else name))
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{error}; arguments of the function travel as JSON, so pass a name, a path or plain values, and "
                    "make of them what the function needs in the __init__ of a class, which is called with each row"
                ) from error
        if (size := sum(map(len, parts))) > ARGUMENTS_MAX:
            raise ConfigError(
                f"args and kwargs are {size >> 10} KiB of JSON, {ARGUMENTS_MAX >> 10} KiB is the most: {_ADVICE}"
            )
        return {name: json.loads(part) for name, part in zip(given, parts, strict=True)}

    def check(self, file: Path, name: str, made: ast.stmt) -> None:
        """Raise ConfigError if the definition of the function shows that it cannot be called so."""
        place = f"{file}:{getattr(made, 'lineno', 0)}: "
        has_arguments = bool(self.before or self.args or self.kwargs)
        if not has_arguments or isinstance(made, ast.ClassDef):
            check_callable(file, name, made)
        if isinstance(made, _Function) and not made.decorator_list:
            self._check_async(place, name, made)
            if has_arguments:
                with_row = [*self.before, None, *self.args]
                _bind(made, with_row, self.kwargs, f"{place}{name} cannot be called with the row, args and kwargs")
        elif isinstance(made, ast.ClassDef) and not (made.bases or made.keywords or made.decorator_list):
            methods = {part.name: part for part in made.body if isinstance(part, _Function) and not part.decorator_list}
            if "__call__" in methods:
                self._check_async(place, name, methods["__call__"])
            if "__init__" in methods:
                what = f"{place}class {name} cannot be made with args and kwargs"
                _bind(methods["__init__"], [None, *self.args], self.kwargs, what)

    def _check_async(self, place: str, name: str, made: _Function) -> None:
        if self.per_process > 1 and isinstance(made, ast.FunctionDef):
            raise ConfigError(
                f"{place}{name} is no `async def`, so a process runs one row at a time: leave out "
                "concurrency_per_process; more rows at once take more workers"
            )


def _bind(made: _Function, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    try:
        signature_of(made.args).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Build the signature of a definition. Of a default only its presence is known."""
    make: Callable[..., inspect.Parameter] = inspect.Parameter
    positional = [(one, inspect.Parameter.POSITIONAL_ONLY) for one in arguments.posonlyargs]
    positional += [(one, inspect.Parameter.POSITIONAL_OR_KEYWORD) for one in arguments.args]
    needed = len(positional) - len(arguments.defaults)
    parameters = [
        make(one.arg, kind, default=inspect.Parameter.empty if n < needed else None)
        for n, (one, kind) in enumerate(positional)
    ]
    if arguments.vararg is not None:
        parameters.append(make(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = inspect.Parameter.empty if default is None else None
        parameters.append(make(one.arg, inspect.Parameter.KEYWORD_ONLY, default=value))
    if arguments.kwarg is not None:
        parameters.append(make(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)
