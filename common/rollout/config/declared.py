"""What a configuration key is beside its type, default, bounds and description (`Field`).

A `Setting` in the key's annotation says which command option sets it, and what a resumed run does with a new value. The
command line, the documentation and resume are derived from it; the environment has every key
(`rollout.config.environment`).

    timeout: Annotated[float, Setting("--timeout", "TIME", on_resume="follow")] = Field(default=0.0, description="...")
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from rollout.config.environment import section_of

OnResume = Literal["refuse", "keep", "follow"]
"""What a resumed run does with a new value. refuse: it is another run; keep: the run keeps its own value, and the user
is told; follow: the new value applies to units without a result."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of a key.

    `option` is `--flag`, or the name of an argument in capitals. `stored` is the dotted key in a run's configuration if
    it differs from the key's own. `parts` are the entries that follow, for a table that keeps the others. In the
    annotation of a section, `on_resume` applies to its keys that follow elsewhere.
    """

    option: str = ""
    metavar: str = ""
    on_resume: OnResume = "refuse"
    stored: str = ""
    parts: frozenset[str] = frozenset()


KEPT = Setting(on_resume="keep")
FOLLOWED = Setting(on_resume="follow")


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared key of a model; `key` is dotted."""

    key: str
    field: FieldInfo
    setting: Setting

    @property
    def shown(self) -> str:
        """How a user sets it."""
        return self.setting.option or self.key

    @property
    def is_argument(self) -> bool:
        return bool(self.setting.option) and not self.setting.option.startswith("-")

    @property
    def reads_text(self) -> bool:
        """Whether the model parses the typed text, such as a number with a unit."""
        return any(isinstance(one, BeforeValidator) for one in self.field.metadata)

    @property
    def help(self) -> str:
        """Description, with the default if it means something and the description does not state it."""
        text = self.field.description or ""
        default = None if self.field.is_required() else self.field.get_default(call_default_factory=True)
        shown = default and not isinstance(default, bool) and not re.search(r"\bdefault\b", text, re.IGNORECASE)
        return f"{text} Default: {default}." if shown else text

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.field.annotation) if get_origin(self.field.annotation) is Literal else ()

    def bound(self, name: Literal["ge", "le"]) -> int | None:
        return next((getattr(one, name) for one in self.field.metadata if hasattr(one, name)), None)


@cache
def declared(model: type[BaseModel], place: str = "") -> tuple[Declared, ...]:
    """Return the keys of `model` and its sections whose annotation has a `Setting`, in order."""
    return tuple(_declared(model, place))


def _declared(model: type[BaseModel], place: str) -> Iterator[Declared]:
    for name, field in model.model_fields.items():
        key = f"{place}.{name}" if place else name
        settings = [one for one in field.metadata if isinstance(one, Setting)]
        inner = section_of(field.annotation)
        if inner is None:
            yield from (Declared(key, field, one) for one in settings)
            continue
        for one in declared(inner, key):
            rule = settings[0].on_resume if settings and one.setting.on_resume == "follow" else one.setting.on_resume
            yield replace(one, setting=replace(one.setting, on_resume=rule))


@cache
def on_resume(model: type[BaseModel], rule: OnResume) -> Mapping[str, str]:
    """Return the dotted keys of a run's configuration under `rule`, and how a user sets each."""
    return MappingProxyType(
        {one.setting.stored or one.key: one.shown for one in declared(model) if one.setting.on_resume == rule}
    )


@cache
def parts_that_follow(model: type[BaseModel]) -> Mapping[str, frozenset[str]]:
    """Return, by dotted key, the entries that follow of tables whose other entries do not."""
    found = [one for one in declared(model) if one.setting.on_resume == "follow" and one.setting.parts]
    return MappingProxyType({one.setting.stored or one.key: one.setting.parts for one in found})
