"""What a key of a configuration is, beside its type, default, bounds and description (`Field`): an option of commands,
and what becomes of a new value when a run goes on. It stands in the annotation of the key, and command line,
documentation and resume are derived from it; the environment has every key (`rollout.config.environment`).

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
"""A run that goes on with a new value of the key. refuse: it is another run; keep: it goes on with its own value, and
the person is told so; follow: the new value holds for what has no result yet."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`option`: `--flag`, or the name of an argument in capitals. `stored`: dotted key in the configuration of a run,
    where that is not the key's own. `parts`: of a table that follows, the entries that do; it keeps the others. In the
    annotation of a section, `on_resume` holds for its keys that follow elsewhere."""

    option: str = ""
    metavar: str = ""
    on_resume: OnResume = "refuse"
    stored: str = ""
    parts: frozenset[str] = frozenset()


KEPT = Setting(on_resume="keep")
FOLLOWED = Setting(on_resume="follow")


@dataclass(frozen=True, slots=True)
class Declared:
    """`key`: dotted."""

    key: str
    field: FieldInfo
    setting: Setting

    @property
    def shown(self) -> str:
        """How a person sets it."""
        return self.setting.option or self.key

    @property
    def is_argument(self) -> bool:
        return bool(self.setting.option) and not self.setting.option.startswith("-")

    @property
    def reads_text(self) -> bool:
        """Whether what is typed is the model's to read, such as a number with a unit."""
        return any(isinstance(one, BeforeValidator) for one in self.field.metadata)

    @property
    def help(self) -> str:
        """The description, with the default where that means something and is not told there."""
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
    """Of `model` and its sections, in their order: the keys whose annotation has a `Setting`."""
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
    """Dotted keys of a run's configuration for which `rule` holds, and how a person sets each."""
    return MappingProxyType(
        {one.setting.stored or one.key: one.shown for one in declared(model) if one.setting.on_resume == rule}
    )


@cache
def parts_that_follow(model: type[BaseModel]) -> Mapping[str, frozenset[str]]:
    """By dotted key: entries of tables that follow, where others do not."""
    found = [one for one in declared(model) if one.setting.on_resume == "follow" and one.setting.parts]
    return MappingProxyType({one.setting.stored or one.key: one.setting.parts for one in found})
