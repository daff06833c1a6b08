"""Long form of `[cloud]`: `[cloud.aws.s3]` is read as `[cloud.s3]`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from rollout.config.locate import Place
from rollout.config.renamed import Renamed

PROVIDERS = ("aws", "gcp")


def short_form(names: Renamed, overridden: Collection[Place] = ()) -> None:
    """Move what stands in `[cloud.aws]` or `[cloud.gcp]` one level up, and record where it was written.

    `overridden` lists places whose values come from the environment or the command line, which take precedence.
    """
    cloud = _table(names.values.get("cloud"))
    if cloud is None:
        return
    provider = cloud.get("provider")
    for name in PROVIDERS:
        if name not in cloud:
            continue
        here: Place = ("cloud", name)
        inner = _table(cloud.pop(name))
        if inner is None:
            names.faults.append((here, f"must be a table, such as [cloud.{name}.{_OF[name]}]"))
        elif provider in PROVIDERS and provider != name:
            there = (*here, *list(inner)[:1])
            names.faults.append(
                (there, f'is of provider = "{name}", but provider = "{provider}": a run has one provider')
            )
        else:
            for key, value in inner.items():
                _move(names, cloud, (*here, key), value, overridden)


_OF = {"aws": "s3", "gcp": "gcs"}


def _move(names: Renamed, cloud: dict[str, Any], origin: Place, value: Any, overridden: Collection[Place]) -> None:
    """Move one section or key of the long form."""
    key = str(origin[-1])
    place: Place = ("cloud", key)
    section = _table(value)
    if key in cloud and (
        section is None or (_in_file(cloud[key], place, overridden) and _in_file(value, origin, overridden))
    ):
        if place not in overridden:
            long = ".".join(map(str, origin))
            names.faults.append((origin, f"[cloud.{key}] and [{long}] are the same: write one of them"))
        return
    if key not in cloud:
        names.places[place] = origin
    if section is None:
        cloud[key] = value
        return
    given: dict[str, Any] = cloud.setdefault(key, {})
    for inner, text in section.items():
        leaf = (*place, inner)
        if inner in given and (*origin, inner) not in overridden:
            names.places[leaf] = leaf
        else:
            given[inner] = text
            names.places[leaf] = (*origin, inner)
    for inner in given.keys() - section.keys():
        names.places[(*place, inner)] = (*place, inner)


def _in_file(value: Any, place: Place, overridden: Collection[Place]) -> bool:
    """Return whether any value of the section comes from the file itself."""
    table = _table(value)
    return table is None or any((*place, key) not in overridden for key in table) or not table


def _table(value: Any) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
