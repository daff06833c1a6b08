"""The configuration that a run of tests stores and its executor reads."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

REPO_ROOT = "/app"
"""Default path of the project in a sandbox."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class GroupConfig(_Model):
    """How tests of a group run."""

    framework: str = "pytest"
    python: tuple[str, ...] = ()
    """For pytest, the command of the interpreter; a path inside the project is relative to it."""
    args: tuple[str, ...] = ()
    """Arguments of the framework for discovery and runs, without those that select tests."""
    options: Annotated[dict[str, Any], Field(default_factory=dict[str, Any])]
    """[framework] as given, for frameworks that run a command per batch."""


class Copy(_Model):
    """A directory copied besides the project: its manifest, in hex, and its path in a sandbox."""

    tree: str
    there: str


class RunConfig(_Model):
    root: str
    """Directory of the project on the client's machine."""
    tree: str = ""
    """Manifest of the project's tree, in hex. If it is empty, tests run in place, in `root`."""
    env: Annotated[dict[str, str], Field(default_factory=dict[str, str])]
    provider: Annotated[dict[str, Any], Field(default_factory=dict[str, Any])]
    """[provider] as given."""
    sandbox: Annotated[dict[str, Any], Field(default_factory=dict[str, Any])]
    """`repo_root`, `project_root` and `init_cmd` of [offload]."""
    copies: Annotated[dict[str, Copy], Field(default_factory=dict[str, Copy])]
    """Copied directories by number."""
    download: tuple[str, ...] = ()
    """Patterns of files that a batch leaves in a copy of the project and that go to the output directory."""
    download_failure_only: bool = False
    groups: Annotated[dict[str, GroupConfig], Field(default_factory=dict[str, GroupConfig])]
    hedge: bool = False
    """Whether another worker also runs a batch that takes too long."""

    @property
    def in_place(self) -> bool:
        return not self.tree
