"""Turns a program's function into the name by which workers import it. Nothing is pickled."""

from __future__ import annotations

import dataclasses
import functools
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, cast

import rollout
from rollout.model.errors import ConfigError
from rollout.workloads.map.call import Call

Function = str | Callable[..., Any]
_IN_MODULE = "a module, such as functions.py, and import it from there"


def resolve(
    function: Function,
    code: str | Path | None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    per_process: int = 0,
) -> tuple[Call, Path | None]:
    """Return (what workers call, directory of the code or None). Raises ConfigError if workers could not import the
    function, with the remedy.

    `function` is PKG.MODULE:NAME, a function or class of a module, a `functools.partial` of one, or a callable instance
    of a dataclass.
    """
    before, given = list[Any](), dict(kwargs or {})
    if isinstance(args, str) or not isinstance(cast(Any, args), Sequence):
        raise ConfigError(f"args must be a list or tuple of arguments, not {type(args).__name__}")
    while isinstance(function, functools.partial):
        before = [*function.args, *before]
        given = {**function.keywords, **given}
        function = function.func
    if dataclasses.is_dataclass(function) and not isinstance(function, type):
        if before or args or given:
            raise ConfigError(f"{_name(type(function))} is made already: args and kwargs are for the class itself")
        fields = [one for one in dataclasses.fields(function) if one.init]
        given = {one.name: getattr(function, one.name) for one in fields}
        function = type(function)
    arguments = [*before, *args] if isinstance(function, type) else list(args)
    directory = None if code is None else Path(code).expanduser()
    if isinstance(function, str):
        name = function
    else:
        name = _importable(function)
        directory = directory or _home(name.partition(":")[0])
    return Call(name, () if isinstance(function, type) else before, arguments, given, per_process), directory


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _importable(function: Callable[..., Any]) -> str:
    """Return the name as PKG.MODULE:NAME."""
    if isinstance(function, MethodType):
        owner: Any = function.__self__ if isinstance(function.__self__, type) else type(function.__self__)
        raise ConfigError(
            f"{function.__name__} is a method of an object, which does not travel: give the class "
            f"{_name(owner)} a __call__(self, row), and give the class, with kwargs={{...}} for its __init__"
        )
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name is None and callable(function):
        kind = cast("type[Any]", type(function))
        raise ConfigError(
            f"an instance of {_name(kind)} does not travel, since nothing is pickled: give the class, and what its "
            f"__init__ takes as kwargs, such as {kind.__name__}, rows, kwargs={{...}}; or make the class a dataclass"
        )
    if not module or not name:
        raise ConfigError(
            f"{function!r:.100} cannot be sent: give a function or class of a module, or its name as a string"
        )
    what = f"{getattr(function, '__name__', function)!s}"
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside a function"
        place = _IN_MODULE if module == "__main__" else module
        raise ConfigError(
            f"{what} is {kind}, which workers cannot import: define it at the top of {place}, and give what it needs "
            "beside the row with args or kwargs"
        )
    if module == "__main__":
        raise ConfigError(
            f"{what} is defined in the program that is being run (__main__), which workers cannot import: move it "
            f"into {_IN_MODULE}"
        )
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise ConfigError(
            f"{module}:{name} is another object than the one given (is it decorated?): workers import it by that name"
        )
    return f"{module}:{name}"


def _home(module: str) -> Path | None:
    """Return the directory from which the module is imported, or None if workers have it: it belongs to Python, an
    installed package or Rollout."""
    origin = getattr(sys.modules[module], "__file__", None)
    if origin is None:  # built in
        return None
    file = Path(origin).resolve()
    depth = module.count(".") + (file.name == "__init__.py")
    home = file.parents[depth]
    if {"site-packages", "dist-packages"} & set(home.parts) or not home.is_dir():
        return None
    own = Path(rollout.__file__).resolve().parent.parent
    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return None if home == own or any(home.is_relative_to(Path(one).resolve()) for one in python) else home
