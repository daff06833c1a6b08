"""`${VAR}` and `${VAR:-default}` in the environment variables that tasks and jobs give to a sandbox.

A file names a secret and never contains it: the template is what is stored, hashed and sent. It is filled in where the
command starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from rollout.config.locate import Place

_TEMPLATE = re.compile(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?)?[^}]*\}?")
_WHOLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-[^}]*)?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_variables(env: Mapping[str, str]) -> None:
    """Raise ValueError for an invalid name, or for a template that is not closed or names nothing."""
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f'"{name[:80]}" is no name of a variable: letters, digits and _, no digit first')
        if "\0" in value:
            raise ValueError(f"{name}: the value holds a zero byte")
        for found in _TEMPLATE.finditer(value):
            if not _WHOLE.fullmatch(found[0]):
                raise ValueError(f'{name}: "{found[0][:80]}" must be like ${{VAR}} or ${{VAR:-default}}')


def missing(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return, for each variable of `env` that cannot be filled in, the names without a value or default."""
    found: dict[str, list[str]] = {}
    for name, value in env.items():
        lacking = [one[1] for one in _TEMPLATE.finditer(value) if one[2] is None and one[1] not in environ]
        if lacking:
            found[name] = list(dict.fromkeys(lacking))
    return found


def fill_in(env: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Fill in the templates of `env` from `environ`. As in a shell, a default also replaces an empty value. Raises
    ValueError with every variable that has neither value nor default."""
    if lacking := missing(env, environ):
        raise ValueError("; ".join(lacks(name, names) for name, names in lacking.items()))
    return {name: _TEMPLATE.sub(lambda found: _filled(found, environ), value) for name, value in env.items()}


def variables(env: Mapping[str, str]) -> set[str]:
    """Return the names of all variables that `env` uses."""
    return {found[1] for value in env.values() for found in _TEMPLATE.finditer(value) if found[1]}


def unset(
    environments: Iterable[tuple[Place, Mapping[str, str]]], environ: Mapping[str, str], where: Callable[[Place], str]
) -> Iterator[str]:
    """Yield a located fault for each variable that cannot be filled in. `environments` has each `env` with its section;
    `where` returns the `file:line` of a place."""
    for place, env in environments:
        for name, names in missing(env, environ).items():
            key = (*place, "env", name)
            yield f"{where(key)}: {'.'.join(map(str, key[:-1]))}: {lacks(name, names)}"


def lacks(name: str, names: list[str]) -> str:
    """Return the message for a variable that cannot be filled in."""
    listed = " and ".join(names)
    verb = "are" if len(names) > 1 else "is"
    return f"{name} needs {listed}, which {verb} not set here: export it, or write ${{{names[0]}:-default}}"


def _filled(found: re.Match[str], environ: Mapping[str, str]) -> str:
    return environ.get(found[1]) or found[2] or ""
