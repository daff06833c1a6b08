"""What a run of tests stores as its configuration, and its executor reads."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

REPO_ROOT = "/app"
"""Where the project is in a sandbox, where nothing says so."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class GroupConfig(_Model):
    """How tests of a group are run."""

    framework: str = "pytest"
    python: tuple[str, ...] = ()
    """pytest: the interpreter, as words, relative to the project where it is in it."""
    args: tuple[str, ...] = ()
    """Arguments of the framework, of discovery and of runs, without what selects tests."""
    options: Annotated[dict[str, Any], Field(default_factory=dict[str, Any])]
    """[framework] as it was given, for frameworks that are commands."""


class Copy(_Model):
    """A directory beside the project: its manifest, in hex, and where it is in a sandbox."""

    tree: str
    there: str


class RunConfig(_Model):
    root: str
    """Directory of the project on the client's machine."""
    tree: str = ""
    """Manifest of the project's tree, in hex; empty: tests run in place, in `root`."""
    env: Annotated[dict[str, str], Field(default_factory=dict[str, str])]
    provider: Annotated[dict[str, Any], Field(default_factory=dict[str, Any])]
    """[provider] as it was given."""
    sandbox: Annotated[dict[str, Any], Field(default_factory=dict[str, Any])]
    """`repo_root`, `project_root` and `init_cmd` of [offload]."""
    copies: Annotated[dict[str, Copy], Field(default_factory=dict[str, Copy])]
    """By number."""
    download: tuple[str, ...] = ()
    """Patterns of files that a batch leaves in a copy of the project, for the output directory."""
    download_failure_only: bool = False
    groups: Annotated[dict[str, GroupConfig], Field(default_factory=dict[str, GroupConfig])]
    hedge: bool = False
    """A batch that takes too long is run by another worker, too."""

    @property
    def in_place(self) -> bool:
        return not self.tree
