"""Takes a safeguard out of the production code: in this process, and in every Python process that it starts.

A removal is a list of edits of source text, each inside one function, method or module-level assignment. Here the edited
function is compiled and its code object put in place of the old one, so that tables of handlers and `from x import y`
see it too. Processes started meanwhile find the edits in their environment: `hook/sitecustomize.py` applies them to the
source as it is loaded. Production code knows nothing of this.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import os
import textwrap
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

ENVIRONMENT = "ABLATION_EDITS"
HOOK = Path(__file__).resolve().parent / "hook"


class StaleEditError(Exception):
    """The code that an edit names is not there any more: bring the table of safeguards up to date."""


@dataclass(frozen=True, slots=True)
class Edit:
    """In `where` ("module:function", "module:Class.method" or "module:NAME"), `old`, found once, becomes `new`."""

    where: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        return self.where.partition(":")[2]


# ---- source


def source_of(module: str) -> tuple[Path, str]:
    """StaleEditError if there is no such module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise StaleEditError(f"there is no module {module}")
    path = Path(spec.origin)
    return path, path.read_text()


def span(source: str, name: str) -> tuple[int, int]:
    """First and one past the last line (from 0) of a definition; decorators are left out."""
    body: list[ast.stmt] = _parsed(source).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in body if _defines(n, part)), None)
        if node is None:
            raise StaleEditError(f"{name} is not defined")
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    return node.lineno - 1, node.end_lineno


@functools.lru_cache(maxsize=256)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def edited(source: str, edits: list[Edit]) -> str:
    """The whole source with the edits in it. StaleEditError unless each `old` is there exactly once."""
    for edit in edits:
        lines = source.splitlines(keepends=True)
        first, last = span(source, edit.name)
        text = "".join(lines[first:last])
        found = text.count(edit.old)
        if found != 1:
            raise StaleEditError(f"{edit.where} holds {edit.old!r} {found} times, not once")
        source = "".join([*lines[:first], text.replace(edit.old, edit.new), *lines[last:]])
    return source


def by_module(edits: list[Edit]) -> dict[str, list[Edit]]:
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.module, []).append(edit)
    return found


# ---- this process


@contextmanager
def removed(edits: list[Edit]) -> Generator[None]:
    """Without what `edits` take out, here and in processes started meanwhile."""
    with ExitStack() as stack:
        for module, its_edits in by_module(edits).items():
            path, source = source_of(module)
            changed = edited(source, its_edits)
            loaded = importlib.import_module(module)
            for name in dict.fromkeys(edit.name for edit in its_edits):
                _replace(loaded, name, changed, path, stack)
        stack.enter_context(_environment(edits))
        yield


def _replace(module: ModuleType, name: str, source: str, path: Path, stack: ExitStack) -> None:
    first, last = span(source, name)
    text = "\n" * first + textwrap.dedent("".join(source.splitlines(keepends=True)[first:last]))
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    function = _function_of(found)
    if function is None:
        code = compile(text, str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        stack.callback(setattr, module, name, found)
        exec(code, vars(module))
        if isinstance(found, list):  # others have imported it by name
            items = cast("list[Any]", found)
            stack.callback(items.__setitem__, slice(None), list(items))
            items[:] = getattr(module, name)
        return
    before = function.__code__
    stack.callback(setattr, function, "__code__", before)
    function.__code__ = _compiled(text, before, path)
    if hasattr(found, "cache_clear"):
        found.cache_clear()
        stack.callback(found.cache_clear)


def _function_of(found: Any) -> FunctionType | None:
    if isinstance(found, staticmethod | classmethod):
        found = cast(Any, found).__func__
    elif isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    found = inspect.unwrap(found) if callable(found) else found
    return found if isinstance(found, FunctionType) else None


def _compiled(text: str, before: CodeType, path: Path) -> CodeType:
    """The code object of the only function in `text`, with the free variables of `before`."""
    tree = ast.parse(text)
    if before.co_freevars:
        names = [ast.arg(name) for name in before.co_freevars]
        outer = ast.parse("def outer(): pass").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.args.args, outer.body = names, tree.body
        tree.body = [outer]
        ast.fix_missing_locations(tree)
    code = compile(tree, str(path), "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    for name in ("outer", before.co_name) if before.co_freevars else (before.co_name,):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code.replace(co_qualname=before.co_qualname)


# ---- other processes


@contextmanager
def _environment(edits: list[Edit]) -> Generator[None]:
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    values = {
        ENVIRONMENT: json.dumps([[e.where, e.old, e.new] for e in edits]),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def edits_of_environment() -> list[Edit]:
    return [Edit(*edit) for edit in json.loads(os.environ.get(ENVIRONMENT, "[]"))]
