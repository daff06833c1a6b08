"""Environment variables: `ROLLOUT_<SECTION>__<KEY>`, which override a file's keys, and all others."""

from __future__ import annotations

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollout.config.locate import parse
from rollout.config.secret_names import SECRET_PREFIX
from rollout.config.settings import CoordinatorSettings, WorkerSettings

PREFIX = "ROLLOUT_"
"""Variables that begin so hold secrets: their values are never shown, and child processes do not inherit them."""
OTHERS = {
    "ROLLOUT_COORDINATOR": "Coordinators for `rollout`: HOST:PORT,...",
    "ROLLOUT_CONTEXT": "Context for `rollout`.",
    "ROLLOUT_TLS_DIR": "Directory of certificates for `rollout`.",
    "ROLLOUT_JOIN_TOKEN": "Token for `join`.",
    "ROLLOUT_DEBUG": "1 prints tracebacks and debug logs on standard error.",
    "ROLLOUT_SECRET_NAME": 'Secret NAME for `[secrets] backend = "env"`.',
    "ROLLOUT_PARENT_FD": "Internal.",
    "ROLLOUT_PLUGIN_SOCKET": "Set for a sidecar plugin: the socket to serve.",
    "ROLLOUT_ENGINE_OWNER": "Internal: marks an engine's processes.",
    "ROLLOUT_SANDBOX": "Set in a sandbox: its name.",
    "ROLLOUT_DEADLINE": "Set for an agent: its deadline in Unix seconds.",
    "ROLLOUT_TIMEOUT_SEC": "Set for an agent: its time limit in seconds.",
    "ROLLOUT_INSTRUCTION_PATH": "Set for an agent: the file with its instruction.",
}
"""Variables that are no configuration keys, and their meaning."""
Override = tuple[str, tuple[str, ...], Any]  # origin, place and value


def variables(model: type[BaseModel], environ: Mapping[str, str]) -> Iterator[Override]:
    """Return (variable, place, value) of each variable that names a section of `model`, or a top-level key.

    A value is parsed as TOML if the key takes it, else it is a string; a list of strings may be separated by commas. An
    unknown key below a known section is returned too, so that validation reports it. Another program's key is not,
    because programs share an environment.
    """
    for name, place in _places(environ):
        field = model.model_fields.get(place[0])
        if field is None:
            continue
        is_section = section_of(field.annotation) is not None
        if is_section and len(place) == 1:
            continue  # e.g. ROLLOUT_TRANSPORT: means nothing to us
        if annotation_of(model, place) is None and _known(place):
            continue
        yield name, place, _value(annotation_of(model, place), environ[name])


def unknown_env_vars(model: type[BaseModel], environ: Mapping[str, str]) -> list[str]:
    """Return the faults of variables that look like keys but name no section of any program, one line each.

    Other variables that begin with ROLLOUT_ are ignored: Kubernetes makes some for a service of that name.
    """
    lines: list[str] = []
    for name, place in _places(environ):
        if name.startswith(SECRET_PREFIX) or name in OTHERS or place[0] in model.model_fields or _known(place):
            continue
        if len(place) > 1:
            lines.append(f"{name}: there is no such key; {_nearest(name)}")
        elif meant := next((key for key in _names() if key.replace("__", "_") == name), None):
            lines.append(f"{name}: there is no such variable; did you mean {meant}?")
    return lines


def _places(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name in sorted(environ):
        if name.startswith(PREFIX):
            yield name, tuple(part.lower() for part in name[len(PREFIX) :].split("__"))


def _nearest(name: str) -> str:
    if close := difflib.get_close_matches(name, [*_names(), *OTHERS], n=1, cutoff=0.7):
        return f"did you mean {close[0]}?"
    sections = sorted({key[len(PREFIX) :].partition("__")[0] for key in _names() if "__" in key})
    return f"variables are ROLLOUT_<SECTION>__<KEY>, with a section of {', '.join(sections)}"


def _known(place: tuple[str, ...]) -> bool:
    return any(annotation_of(model, place) is not None for model in _models())


def _models() -> Iterator[type[BaseModel]]:
    yield CoordinatorSettings
    yield WorkerSettings
    yield from _of_workloads()


@cache
def _of_workloads() -> tuple[type[BaseModel], ...]:
    """Return the workloads' models; they are imported when a variable is no daemon's."""
    found: list[type[BaseModel]] = []
    for entry in entry_points(group="rollout.workloads"):
        try:
            settings: Any = entry.load().settings
        except Exception:  # noqa: BLE001 - whatever a third party's module does wrong: its commands tell of it
            continue
        if isinstance(settings, type) and issubclass(settings, BaseModel):
            found.append(settings)
    return tuple(found)


@cache
def _names() -> tuple[str, ...]:
    """Return every variable that is a key."""
    return tuple(sorted({name for model in _models() for name in _names_of(model, PREFIX)}))


def _names_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, field in model.model_fields.items():
        name = f"{prefix}{(field.alias or key).upper()}"
        inner = section_of(field.annotation)
        if inner is None:
            yield name
        else:
            yield from _names_of(inner, f"{name}__")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings model in `annotation`, also inside a union."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def annotation_of(model: type[BaseModel], place: tuple[str | int, ...]) -> Any:
    """Return the type of the value at `place`, or None if `model` has no such key."""
    current: Any = model
    for key in place:
        section = section_of(current)
        if section is not None:
            field = section.model_fields.get(str(key))
            if field is None:
                return None
            current = field.annotation
            continue
        inner = _inside(current, key)
        if inner is None:
            return None
        current = inner
    return current


def _inside(annotation: Any, key: str | int) -> Any:
    """Return the type of the values of a dict or list, or None for other types."""
    for option in _options(annotation):
        if get_origin(option) is dict:
            return get_args(option)[1]
        if get_origin(option) in (list, tuple) and isinstance(key, int):
            return get_args(option)[0]
    return None


def _value(annotation: Any, text: str) -> Any:
    if annotation is None:
        return text
    for candidate in _readings(text):
        try:
            TypeAdapter[Any](annotation).validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return candidate
    return text


def _readings(text: str) -> list[Any]:
    readings: list[Any] = []
    try:
        readings.append(parse(f"v = {text}")["v"])
    except tomllib.TOMLDecodeError:
        if text in ("True", "False"):
            readings.append(text == "True")
    return [*readings, text, [part.strip() for part in text.split(",") if part.strip()]]
