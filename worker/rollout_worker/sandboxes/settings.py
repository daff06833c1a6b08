"""`provider_config`: validated settings of a provider; all faults are reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rollout.config.load import problems
from rollout.config.wording import describe
from rollout.model.errors import ConfigError

from rollout_worker.sandboxes.port import ImageChoice

KEY = "provider_config"


class Settings(BaseModel):
    """Keys of one provider; this base class has none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ImageSettings(Settings):
    """Keys of providers whose images `images.prepare` makes."""

    image: ImageChoice = Field(default="auto", description="How the image of a task is had.")


S = TypeVar("S", bound=Settings)


def settings_of(kind: type[S], config: Mapping[str, Any], provider: str) -> S:
    """Validate the settings. Raises ConfigError with a line for each fault, which begins with `provider_config.KEY`."""
    try:
        return kind.model_validate(dict(config))
    except ValidationError as error:
        faults: list[str] = []
        for entry in error.errors(include_url=False):
            place = ".".join([KEY, *map(str, entry["loc"])])
            unknown = entry["type"] == "extra_forbidden" and len(entry["loc"]) == 1
            text = _unknown(kind, str(entry["loc"][-1]), provider) if unknown else describe(entry, place)
            faults.append(f"{place}: {text}")
        raise ConfigError(problems(faults)) from error


def _unknown(kind: type[Settings], key: str, provider: str) -> str:
    valid = list(kind.model_fields)
    if not valid:
        return f"unknown key; the provider {provider} has none: remove it"
    near = get_close_matches(key, valid, n=1)
    hint = f'did you mean "{near[0]}"?' if near else f"valid keys of {provider} are {', '.join(valid)}"
    return f"unknown key; {hint}"
