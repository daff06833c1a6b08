"""Checks from its source, without running it, whether an agent's function accepts the variants' bindings."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rollout.workloads.experiment.config import VariantKeys

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a call `function(row, **bindings)`. `takes_row`: it accepts the row. `names` are those of
    keyword arguments, None for any."""

    takes_row: bool
    names: tuple[str, ...] | None
    required: tuple[str, ...]


def parameters_of(made: ast.stmt) -> Parameters | None:
    """Return the parameters of a function, or of a class whose instances are called. Returns None if only running it
    would tell, because it is decorated or inherits."""
    function, skipped = made, 0
    if isinstance(made, ast.ClassDef):
        if made.decorator_list:
            return None
        calls = [one for one in made.body if isinstance(one, _Function) and one.name == "__call__"]
        if not calls:
            return None
        function, skipped = calls[-1], 1
    if not isinstance(function, _Function) or function.decorator_list:
        return None
    written = function.args
    positional = [one.arg for one in (*written.posonlyargs, *written.args)]
    only_by_name = [one.arg for one in written.kwonlyargs]
    optional = set(positional[len(positional) - len(written.defaults) :])
    optional |= {name for name, value in zip(only_by_name, written.kw_defaults, strict=True) if value is not None}
    row, others = positional[skipped : skipped + 1], [*positional[skipped + 1 :], *only_by_name]
    only_by_place = {one.arg for one in written.posonlyargs}
    return Parameters(
        takes_row=bool(row) or written.vararg is not None,
        names=None if written.kwarg is not None else tuple(name for name in others if name not in only_by_place),
        required=tuple(name for name in others if name not in optional),
    )


def binding_faults(name: str, where: str, found: Parameters, variants: Sequence[VariantKeys]) -> Iterator[str]:
    """Yield a line for each fault, which begins with its key. `name` and `where` identify the function."""
    if not found.takes_row:
        yield f"runtime.function: {where}: {name} must take the row as its first argument"
        return
    for index, variant in enumerate(variants):
        key = "baseline.bindings" if index == 0 else f"variant_plan.{index - 1}.bindings"
        for binding in variant.bindings:
            if found.names is not None and binding not in found.names:
                near = get_close_matches(binding, found.names, n=1)
                hint = (
                    f"; did you mean {near[0]}?" if near else f"; it takes {', '.join(found.names) or 'the row alone'}"
                )
                yield f"{key}.{binding}: {name} ({where}) has no parameter {binding}{hint}"
        for parameter in found.required:
            if parameter not in variant.bindings:
                yield f"{key}: {name} ({where}) needs {parameter}: bind it, or give the parameter a default"
