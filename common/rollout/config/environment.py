"""`ROLLOUT_<SECTION>__<KEY>`: values of the environment over those of a file."""

from __future__ import annotations

import tomllib
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from rollout.config.locate import parse

PREFIX = "ROLLOUT_"


def variables(model: type[BaseModel], environ: Mapping[str, str]) -> list[tuple[str, tuple[str, ...], Any]]:
    """(variable, place, value) of each variable that names a section of `model`, or a key of its top level.

    A value is read as a TOML value where the key takes one, else as a string; a list of strings may be written with
    commas. A key below a known section that does not exist is returned too: validation reports it.
    """
    found: list[tuple[str, tuple[str, ...], Any]] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        place = tuple(part.lower() for part in name[len(PREFIX) :].split("__"))
        field = model.model_fields.get(place[0])
        if field is None:
            continue
        is_section = section_of(field.annotation) is not None
        if is_section and len(place) == 1:
            continue  # e.g. ROLLOUT_TRANSPORT: means nothing to us
        found.append((name, place, _value(annotation_of(model, place), environ[name])))
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The settings model in `annotation`, also inside a union."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def annotation_of(model: type[BaseModel], place: tuple[str | int, ...]) -> Any:
    """Type of the value at `place`; None where `model` knows no such key."""
    current: Any = model
    for key in place:
        section = section_of(current)
        if section is not None:
            field = section.model_fields.get(str(key))
            if field is None:
                return None
            current = field.annotation
            continue
        if get_origin(current) is dict:
            current = get_args(current)[1]
            continue
        return None
    return current


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
