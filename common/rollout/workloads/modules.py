"""Finds what Python modules define from their text alone: nothing is imported, and no user code runs."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rollout.model.errors import ConfigError

SHOWN = 5
"""Maximum number of names in a message."""


def module_file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


def is_installed(module: str) -> bool:
    """Return whether its top-level package is installed; to find out more would run its code."""
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def import_faults(path: str) -> Iterator[str]:
    """Yield what prevents `path`, module:name, from being imported from the current directory or installed packages."""
    module, _, name = path.partition(":")
    file = module_file(Path.cwd(), module)
    if file is not None:
        try:
            definition(file, name)
        except ConfigError as error:
            yield error.message
    elif not is_installed(module):
        yield f"there is no module {module} in {Path.cwd()}, nor is it installed"


def functions_in(file: Path) -> list[str]:
    """Return the public functions at the top level of `file`."""
    with suppress(SyntaxError, OSError, ValueError):
        tree = ast.parse(file.read_bytes(), str(file))
        made = [one.name for one in _top_level(tree.body) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        return [name for name in dict.fromkeys(made) if not name.startswith("_")]
    return []


def definition(file: Path, name: str) -> ast.stmt | None:
    """Return the statement at the top level of `file` that defines `name`, or the part of `name` before a dot.

    Returns None if only running the module would tell. Raises ConfigError if the module has a fault, or no such name.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise ConfigError(f"{file}:{error.lineno}: {error.msg}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    found: dict[str, ast.stmt] = {}
    for statement in _top_level(tree.body):
        for made in _names(statement):
            found[made] = statement
    first = name.partition(".")[0]
    if "*" in found or "__getattr__" in found:
        return None
    if first not in found:
        near = difflib.get_close_matches(first, found, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; it defines {', '.join(functions_in(file)[:SHOWN])}"
        raise ConfigError(f"{file} defines no {first!r}{hint if near or functions_in(file) else ''}")
    return found[first]


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _top_level(getattr(statement, part, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _top_level(handler.body)


def _names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
