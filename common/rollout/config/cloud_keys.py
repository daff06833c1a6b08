"""The longer form of `[cloud]`: `[cloud.aws.s3]` stands for `[cloud.s3]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

PROVIDERS = ("aws", "gcp")


def short_form(values: Any) -> Any:
    """`values` of `[cloud]` with what stands below the provider's name put one level up. ValueError: both forms of one
    section, or a provider's name that is not that of `provider`."""
    if not isinstance(values, Mapping):
        return values
    given = dict(cast("Mapping[str, Any]", values))
    provider = given.get("provider")
    for name in PROVIDERS:
        inner = given.get(name)
        if not isinstance(inner, Mapping):
            continue
        if provider and provider != name:
            raise ValueError(f'[cloud.{name}] is there, but provider = "{provider}": a run has one provider')
        del given[name]
        for key, value in cast("Mapping[str, Any]", inner).items():
            if key in given:
                raise ValueError(f"[cloud.{key}] and [cloud.{name}.{key}] are the same section: write one of them")
            given[key] = value
    return given
