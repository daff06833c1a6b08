"""Maps keys of Harbor's job files to those of job.yaml, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from rollout.config.load import Located
from rollout.config.locate import Place


def _tries(retries: Any) -> Any:
    return retries + 1 if isinstance(retries, int) and not isinstance(retries, bool) else retries


def _milliseconds(seconds: Any) -> Any:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return round(seconds * 1000) if number else seconds


def _preserve(delete: Any) -> Any:
    word = str(delete).lower()
    return "never" if word in ("true", "yes", "on") else "always" if word in ("false", "no", "off") else delete


def _level(debug: Any) -> Any:
    return "debug" if debug is True else "info" if debug is False else debug


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Renamed:
    """A renamed key. `section` is its place; "*" means every item of a list."""

    section: tuple[str, ...]
    old: str
    new: tuple[str, ...]
    convert: Callable[[Any], Any] = _same


RENAMED = (
    Renamed((), "job_name", ("name",)),
    Renamed((), "debug", ("log_level",), _level),
    Renamed(("retry",), "max_retries", ("max_attempts",), _tries),
    Renamed(("retry",), "min_wait_sec", ("initial_delay_ms",), _milliseconds),
    Renamed(("retry",), "max_wait_sec", ("max_delay_ms",), _milliseconds),
    Renamed(("retry",), "wait_multiplier", ("multiplier",)),
    Renamed(("retry",), "include_exceptions", ("include",)),
    Renamed(("retry",), "exclude_exceptions", ("exclude",)),
    Renamed(("environment",), "delete", ("preserve_env",), _preserve),
    Renamed(("environment",), "import_path", ("type",)),
    Renamed(("environment",), "kwargs", ("provider_config",)),
    Renamed(("datasets", "*"), "registry_path", ("registry", "path")),
    Renamed(("datasets", "*"), "registry_url", ("registry", "url")),
    Renamed(("datasets", "*"), "ref", ("version",)),
    Renamed(("datasets", "*"), "repo", ("git_url",)),
)

ORCHESTRATOR = "orchestrator"
"""A section whose keys move to the top level; its `type` can only be local, and its `kwargs` belong to other types."""

WITHOUT_EFFECT: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), "quiet"),
    (("environment",), "stream"),
    (("environment",), "suppress_override_warnings"),
    (("datasets", "*"), "overwrite"),
    (("datasets", "*"), "download_dir"),
    (("tasks", "*"), "overwrite"),
    (("tasks", "*"), "download_dir"),
)
"""(section, key) of keys that control Harbor's display and caches. They affect no result, so they are accepted and
ignored."""


def rename(source: Located) -> Iterator[str]:
    """Rename Harbor's keys to ours, in place. Yields a fault for each pair that disagrees."""
    yield from _lift(source)
    for section, key in WITHOUT_EFFECT:
        for _, values in _sections(source.values, section, ()):
            values.pop(key, None)
    for renamed in RENAMED:
        for place, section in _sections(source.values, renamed.section, ()):
            if renamed.old in section:
                yield from _move(source, place, section, renamed)


def _lift(source: Located) -> Iterator[str]:
    """Move the keys of `orchestrator` to the top level."""
    found = source.values.pop(ORCHESTRATOR, None)
    place = (ORCHESTRATOR,)
    if found is None:
        return
    if not isinstance(found, dict):
        yield f"{source.where(place)}: {ORCHESTRATOR}: must be keys and values, such as n_concurrent_trials: 4"
        return
    keys = cast("dict[str, Any]", found)
    if keys.pop("type", "local") != "local":
        yield f"{source.where((*place, 'type'))}: {ORCHESTRATOR}.type: only local is known here"
    keys.pop("kwargs", None)
    for key, value in keys.items():
        if source.values.setdefault(key, value) != value:
            yield f"{source.where((*place, key))}: {ORCHESTRATOR}.{key}: also stands at the top, and is not the same"
    for at, line in list(source.lines.items()):
        if at[:1] == place and len(at) > 1:
            source.lines.setdefault(at[1:], line)


def _sections(values: Any, section: tuple[str, ...], place: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
    if not section:
        if isinstance(values, dict):
            yield place, cast("dict[str, Any]", values)
        return
    if section[0] == "*":
        for index, item in enumerate(cast("list[Any]", values) if isinstance(values, list) else []):
            yield from _sections(item, section[1:], (*place, index))
    elif isinstance(values, dict) and section[0] in values:
        yield from _sections(cast("dict[str, Any]", values)[section[0]], section[1:], (*place, section[0]))


def _move(source: Located, place: Place, section: dict[str, Any], renamed: Renamed) -> Iterator[str]:
    value = renamed.convert(section.pop(renamed.old))
    line = source.lines.get((*place, renamed.old))
    target, at = section, place
    for key in renamed.new[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            return  # told as what it is: no keys and values
        target, at = cast("dict[str, Any]", inner), (*at, key)
    key = renamed.new[-1]
    if key in target and target[key] != value:
        new = ".".join(renamed.new)
        where = f"{source.path}:{line}" if line else source.path
        name = ".".join(map(str, (*place, renamed.old)))
        yield f"{where}: {name}: another name of {new}, and both are set: keep {new}"
        return
    target[key] = value
    if line:
        source.lines.setdefault((*at, key), line)
