"""Files of a sandbox that are kept after a trial."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from rollout.config.section import Section

MAIN_SERVICE = "main"
"""The service in which the agent works."""
SERVICE = r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$"


class Artifact(Section):
    """`source` is a path in the sandbox. `destination` is one below the trial's directory of artifacts, by default that
    of the source. `exclude` are patterns of files to leave out of a directory."""

    source: str = Field(min_length=1)
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list[str])
    service: str | None = Field(default=None, pattern=SERVICE)

    @field_validator("source")
    @classmethod
    def _no_parents(cls, value: str) -> str:
        if ".." in PurePosixPath(value).parts:
            raise ValueError(f'"{value[:80]}" must not hold ".."')
        return value

    @field_validator("destination")
    @classmethod
    def _inside(cls, value: str | None) -> str | None:
        if value is None:
            return None
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or "\\" in value or not path.parts:
            raise ValueError(f'"{value[:80]}" must be a relative path with forward slashes and without ".."')
        if str(path) == "manifest.json":
            raise ValueError('"manifest.json" is where the list of artifacts is kept: choose another name')
        return str(path)

    @model_validator(mode="after")
    def _absolute_in_services(self) -> Self:
        if self.service not in (None, MAIN_SERVICE) and not self.source.startswith("/"):
            raise ValueError(f'source "{self.source[:80]}" must be an absolute path, since it is of another service')
        return self


def _from_text(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


ArtifactKey = Annotated[Artifact, BeforeValidator(_from_text)]
"""An artifact as files write it: a path, or a table."""
