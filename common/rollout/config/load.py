"""Loader of all configuration files: locations in every error, the nearest valid key, overrides by the environment.

Relative paths in a file are relative to the current directory of the program that reads it, not to the file: the file
then means the same to a daemon with `WorkingDirectory` and to a user's shell.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from rollout.config.cloud_keys import short_form
from rollout.config.cloud_rules import faults as cloud_faults
from rollout.config.environment import Override, annotation_of, section_of, unknown_env_vars, variables
from rollout.config.locate import Place, key_lines, parse, syntax_error
from rollout.config.renamed import Renamed, Renames
from rollout.config.section import Section
from rollout.config.wording import describe
from rollout.model.errors import ConfigError, RolloutError
from rollout.model.problems import problems

Model = TypeVar("Model", bound=BaseModel)


@dataclass
class Located:
    """Values and the origin of each: a line of the file, a variable, or the command line."""

    path: str
    values: dict[str, Any]
    lines: dict[Place, int]
    origins: dict[Place, str] = field(default_factory=dict[Place, str])

    @classmethod
    def read(cls, path: Path) -> Located:
        """Read a file as `read_values` does."""
        return cls(str(path), *read_values(path))

    @property
    def is_yaml(self) -> bool:
        return Path(self.path).suffix.lower() in YAML

    def override(self, *layers: Iterable[Override]) -> None:
        """Merge `layers` into the file's values: a later one takes precedence, and a table given whole replaces."""
        tables = [self.values]
        for layer in layers:
            tables.append({})
            for origin, place, value in layer:
                self.origins[place] = origin
                for table in tables if isinstance(value, dict) else tables[-1:]:
                    _put(table, place, value)
        if not any(tables[1:]):
            return
        from pydantic_settings import BaseSettings, InitSettingsSource  # 30 ms of every start, for those that need it

        class Merged(BaseSettings, extra="allow"):
            @classmethod
            def settings_customise_sources(cls, settings_cls: type[BaseSettings], *_: Any, **__: Any) -> Any:
                return tuple(InitSettingsSource(settings_cls, table) for table in reversed(tables))

        self.values = Merged().model_extra or {}

    def where(self, place: Place) -> str:
        """Return `file:line` of the value at `place`, or of the section that would contain it."""
        for end in range(len(place), 0, -1):
            if origin := self.origins.get(place[:end]):
                return origin
            if line := self.lines.get(place[:end]):
                return f"{self.path}:{line}"
        inside = [line for key, line in self.lines.items() if key[: len(place)] == place]
        if place and inside:
            return f"{self.path}:{min(inside)}"
        below = (origin for key, origin in self.origins.items() if place and key[: len(place)] == place)
        return next(below, self.path)

    def order(self, place: Place) -> int:
        return next((self.lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in self.lines), 0)


def load_settings(
    model: type[Model],
    path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> Model:
    """Load `path` as `model`, overridden by the environment and then by `overrides`. None means there is no file.

    `overrides` maps dotted keys ("workers.count") to values; None overrides nothing. Raises ConfigError with every
    fault, one line each: `file:line: section.key: what is wrong`.
    """
    if path is not None and Path(path).suffix.lower() in YAML and not getattr(model, "in_yaml", False):
        raise ConfigError(f"{path}: this configuration is TOML, not YAML: see the configuration reference")
    source = Located("command line", {}, {}) if path is None else Located.read(Path(path))
    environment = os.environ if environ is None else environ
    source.override(variables(model, environment), from_options(overrides))
    return validated(model, source, unknown_env_vars(model, environment))


def from_options(options: Mapping[str, Any] | None) -> Iterator[Override]:
    """Return `overrides` of `load_settings` as a layer of `Located.override`."""
    return (("command line", tuple(key.split(".")), one) for key, one in (options or {}).items() if one is not None)


def _put(table: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for key in place[:-1]:
        if not isinstance(table.get(key), dict):
            table[key] = {}
        table = table[key]
    table[place[-1]] = value


def validated(model: type[Model], source: Located, others: Sequence[str] = ()) -> Model:
    """Validate `source` as `model`. Raises ConfigError with every fault, including `others`.

    A model's class method `prepare(source: Located) -> list[str]` is called first, if it exists. It may move old key
    names to new ones, and returns faults that concern several keys, as lines, so that they are reported with the
    others.
    """
    if prepare := getattr(model, "prepare", None):
        others = [*cast("Callable[[Located], list[str]]", prepare)(source), *others]
    names = _renamed(model, source.values, source.origins)
    try:
        settings = model.model_validate(names.values, strict=True)
    except ValidationError as error:
        raise ConfigError(problems([*_report(model, source, names, error), *others]), path=source.path) from error
    if names.faults or others:
        raise ConfigError(problems([*_report(model, source, names, None), *others]), path=source.path)
    if isinstance(settings, Section):
        settings.remember(names.notes)
    return settings


def _renamed(model: type[BaseModel], values: dict[str, Any], overridden: Collection[Place] = ()) -> Renamed:
    """Return the values under the model's names. `overridden` lists places whose values are not the file's."""
    fields = model.model_fields
    names = model.renamed(values) if isinstance(model, Renames) else Renamed(values)
    if "cloud" in fields:
        short_form(names, overridden)
        cloud = names.values.get("cloud")
        if isinstance(cloud, dict):
            found = cloud_faults(cast("dict[str, Any]", cloud))
            names.faults += [(names.in_file(place), text) for place, text in found]
    return names


@contextmanager
def located(path: Path | None, model: type[BaseModel] | None = None) -> Generator[None]:
    """Add file and line to error lines raised inside that begin with a key of `path`, such as `backend.kind: ...`.

    `model` is the file's, if the file may use other names for its keys.
    """
    try:
        yield
    except RolloutError as error:
        if path is not None:
            error.message = _with_places(error.message, path, model)
        raise


def _with_places(message: str, path: Path, model: type[BaseModel] | None) -> str:
    values, lines = read_values(path)
    keys = {".".join(map(str, place)): line for place, line in lines.items()}
    names = Renamed(values) if model is None else _renamed(model, values)
    if model is None:
        short_form(names)
    given = {".".join(map(str, new)): ".".join(map(str, old)) for new, old in names.places.items()}

    def place(found: re.Match[str]) -> str:
        key = given.get(found[2], found[2])
        line = keys.get(key) or _of_short_form(key.split("."), values, lines)
        named = "." in key or not found[1]  # else it is a section, and what is below it is not in the file
        return found[0] if line is None or not named else f"{found[1]}{path}:{line}: {key}: "

    return re.sub(r"^( *)([a-z][\w.]*): ", place, message, flags=re.MULTILINE)


def _of_short_form(place: list[str], values: Any, lines: Mapping[Place, int]) -> int | None:
    """Return the line of `model = "a"`, the short form of `model.uri = "a"`."""
    for end, key in enumerate(place, 1):
        if not isinstance(values, dict) or key not in values:
            return None
        values = cast("dict[str, Any]", values)[key]
        if end < len(place) and not isinstance(values, dict):
            return lines.get(tuple(place[:end]))
    return None


def refuse_strangers(model: type[BaseModel], environ: Mapping[str, str]) -> None:
    """Raise ConfigError for variables that look like keys but are none, if no file of `model` is read."""
    if unknown := unknown_env_vars(model, environ):
        raise ConfigError(problems(unknown))


def read_values(path: Path) -> tuple[dict[str, Any], dict[Place, int]]:
    """Return the file's unchecked values and the line of each key. Raises ConfigError if it is unreadable, not text or
    not TOML."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: {_no_file(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text: save the file as UTF-8") from error
    return _FORMATS.get(path.suffix.lower(), _toml)(path, text)


_BARE = re.compile(r"[A-Za-z_./~][\w./~:@-]*")
"""Pattern of a string whose quotes were forgotten."""


_LIKE = 0.75
"""Minimum similarity of a suggested file name; a common ending alone makes two names half alike."""


def _no_file(path: Path) -> str:
    where = "" if path.is_absolute() else f" in the current directory {Path.cwd()}"
    try:
        beside = [one.name for one in path.parent.iterdir()]
    except OSError:
        return f"no such file{where}, nor the directory {path.parent}"
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=_LIKE)
    return f"no such file{where}; did you mean {path.with_name(near[0])}?" if near else f"no such file{where}"


def _toml(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    try:
        values = parse(text)
    except tomllib.TOMLDecodeError as error:
        line, column, what = syntax_error(error, text)
        shown = text.split("\n")[line - 1].strip() if line <= text.count("\n") + 1 else ""
        _, equals, value = shown[:100].partition("=")
        if what == "Invalid value" and equals and _BARE.fullmatch(value.strip()):
            what = "text needs quotes"
            shown = f'"{value.strip()}"'
        hint = f": {shown[:100]}" if shown else ""
        raise ConfigError(f"{path}:{line}:{column}: not valid TOML: {what}{hint}") from error
    return values, key_lines(text)


def _yaml(path: Path, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    from rollout.config.yaml import YamlError, parse_yaml  # 45 ms of every command's start, for those that need it

    try:
        return parse_yaml(text)
    except YamlError as error:
        raise ConfigError(problems(f"{path}:{line}: {what}" for line, what in error.faults)) from error


YAML = (".yaml", ".yml", ".json")
"""Endings of files that are read as YAML, which includes JSON; models that allow it set `in_yaml`."""
_FORMATS: dict[str, Callable[[Path, str], tuple[dict[str, Any], dict[Place, int]]]] = {
    ".toml": _toml,
    **dict.fromkeys(YAML, _yaml),
}


def _to_add(name: object, section: type[BaseModel]) -> str:
    """Return what to add if a section is missing."""
    required = {key: field for key, field in section.model_fields.items() if field.is_required()}
    if not required:
        return f"add a line [{name}]"
    keys = " and ".join(
        f'{key} = "..."' if field.annotation is str else f"{key} = ..." for key, field in required.items()
    )
    told = {key: (field.description or "").partition(". ")[0].rstrip(".") for key, field in required.items()}
    meant = "; ".join(f"{key}: {text}" for key, text in told.items() if text)
    return f"add a line [{name}] and below it {keys}" + (f" ({meant})" if meant else "")


def _report(model: type[BaseModel], source: Located, names: Renamed, error: ValidationError | None) -> list[str]:
    faults: dict[Place, list[str]] = {}
    for place, text in names.faults:
        faults.setdefault(place, []).append(text)
    sections: list[str] = []
    for entry in error.errors(include_url=False) if error is not None else []:
        missing = entry["type"] == "missing"
        inside = entry.get("ctx", {}).get("key")
        own = _known_part(names.values, tuple(entry["loc"]), missing=missing)
        own = (*own, *(int(part) if part.isdigit() else part for part in inside.split("."))) if inside else own
        place = names.in_file(own)
        if missing and not source.is_yaml and (section := _section_at(model, place)):
            sections.append(f"{source.where(place)}: section [{place[0]}] is missing: {_to_add(place[0], section)}")
            continue
        if entry["type"] == "extra_forbidden":
            text = _unknown_key(model, own)
        else:
            table = "keys and values" if source.is_yaml else "a table, such as [section]"
            text = describe(cast(Mapping[str, Any], entry), ".".join(map(str, place)), table)
        texts = faults.setdefault(place, [])
        if text not in texts:
            texts.append(text)
    ordered = sorted(faults.items(), key=lambda item: source.order(item[0]))
    told: set[str] = set()
    for _, texts in ordered:
        texts[:] = [_told_once(text, told) for text in texts]
    return sections + [
        f"{source.where(place)}: {'.'.join(map(str, place)) + ': ' if place else ''}{_joined(texts)}"
        for place, texts in ordered
    ]


def _section_at(model: type[BaseModel], place: Place) -> type[BaseModel] | None:
    found = model.model_fields.get(str(place[0])) if len(place) == 1 else None
    return section_of(found.annotation) if found else None


def _joined(texts: list[str]) -> str:
    """Join the errors of a union's branches into one sentence: "must be a string or a list, not 3"."""
    parts = [re.fullmatch(r"must be (.*), not (.*)", text) for text in texts]
    if all(parts) and len({part[2] for part in parts if part}) == 1:
        return f"must be {' or '.join(part[1] for part in parts if part)}, not {parts[0][2] if parts[0] else ''}"
    return " or ".join(texts)


def _known_part(values: Any, loc: Place, *, missing: bool) -> Place:
    """Return `loc` without what pydantic adds after the key: the branch of a union, the name of a validator."""
    place: Place = ()
    for key in loc:
        if isinstance(values, dict) and key in values:
            values = cast(dict[Any, Any], values)[key]
        elif isinstance(values, list) and isinstance(key, int) and key < len(cast(list[Any], values)):
            values = cast(list[Any], values)[key]
        else:
            return (*place, key) if missing else place
        place = (*place, key)
    return place


_OWNERS = {
    "storage": "is of a coordinator's configuration: `rollout-coordinator run` reads this file",
    "worker": "is of a worker's configuration: `rollout-worker run` reads this file",
    **dict.fromkeys(
        ("model", "sampling", "input", "output", "backend"),
        "is of a batch's configuration: `rollout infer batch` reads this file",
    ),
}
"""Sections that show which program a file is for; passing a file to the wrong program is the most common mistake."""


_UNKNOWN = "unknown key; valid keys are "


def _unknown_key(model: type[BaseModel], place: Place) -> str:
    section = section_of(annotation_of(model, place[:-1]))
    valid = list(section.model_fields) if section else []
    key = str(place[-1])
    if close := difflib.get_close_matches(key, valid, n=1, cutoff=0.6):
        return f'unknown key; did you mean "{close[0]}"?'
    if section is model and (owner := _OWNERS.get(key)):
        return f"[{key}] {owner}; the sections valid here are {', '.join(valid)}"
    below = (
        [name for name, field in section.model_fields.items() if _has(section_of(field.annotation), key)]
        if section
        else []
    )
    if below and section is not model:
        named = ".".join(map(str, place[:-1]))
        return f"unknown key here; it belongs in {' or '.join(f'[{named}.{name}]' for name in below)}"
    elsewhere = [name for name, field in model.model_fields.items() if _has(section_of(field.annotation), key)]
    if elsewhere:
        return f"unknown key here; it belongs in [{elsewhere[0]}]"
    return f"{_UNKNOWN}{', '.join(valid)}"


def _told_once(text: str, told: set[str]) -> str:
    """Return the message of an unknown key, without the list of valid keys if another message has it."""
    if not text.startswith(_UNKNOWN):
        return text
    if text in told:
        return "unknown key"
    told.add(text)
    return text


def _has(section: type[BaseModel] | None, key: str) -> bool:
    return section is not None and key in section.model_fields
