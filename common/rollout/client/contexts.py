"""Named clusters of an account: what `rollout context` keeps in `$XDG_CONFIG_HOME/rollout/contexts.toml`.

A context names the directory of an identity, and with it the cluster. Its addresses are in that directory's
`join.json`, which is kept up to date; only a context that was added by hand has addresses of its own.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from rollout.config.load import load_settings
from rollout.config.section import Section
from rollout.files import replacing
from rollout.model.errors import ConfigError, NotFoundError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Context(Section):
    """One cluster."""

    tls_dir: str = Field(description="Directory of the operator's certificates.")
    coordinator_addrs: list[str] = Field(
        default_factory=list[str], description="Coordinators; empty: those of the directory's join.json."
    )
    cluster: str = Field(default="", description="Its name; empty: as in join.json.")


class _File(Section):
    current: str = ""
    contexts: dict[str, Context] = Field(default_factory=dict[str, Context])


@dataclass(slots=True)
class Contexts:
    """All contexts of an account. `current` is used if nothing else names a cluster; it may be empty."""

    current: str = ""
    known: dict[str, Context] = field(default_factory=dict[str, Context])

    @classmethod
    def read(cls) -> Contexts:
        """Read the file; an account without one has no contexts. Raises ConfigError for an unusable file."""
        path = contexts_path()
        if path is None or not path.is_file():
            return cls()
        # No variable of the environment is an override of this file.
        found = load_settings(_File, path, environ={})
        return cls(found.current, dict(found.contexts))

    def get(self, name: str) -> Context:
        """Return a context. Raises NotFoundError with the known ones."""
        if name not in self.known:
            others = f"known: {', '.join(sorted(self.known))}" if self.known else "`rollout join` makes one"
            raise NotFoundError(f"there is no context {name!r}; {others}")
        return self.known[name]

    def add(self, name: str, context: Context, *, use: bool) -> None:
        """Add or change a context. Raises ConfigError for an invalid name."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"context {name!r}: a name has letters, digits, '.', '_' and '-', at most 63, and begins with a letter "
                "or digit"
            )
        self.known[name] = context
        if use:
            self.current = name

    def write(self) -> None:
        """Write the file. Raises ConfigError if the directory cannot be written."""
        path = contexts_path()
        if path is None:
            raise ConfigError("this account has no home directory to keep contexts in: set XDG_CONFIG_HOME")
        lines = ["# Kept by `rollout join` and `rollout context`.", f"current = {json.dumps(self.current)}"]
        for name, context in sorted(self.known.items()):
            lines += ["", f"[contexts.{json.dumps(name)}]"]
            # A JSON string or list of strings is the same in TOML.
            values = context.model_dump(exclude_defaults=True)
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path, durable=False, shared=True, mode=0o600) as file:
                file.write(("\n".join(lines) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def contexts_path() -> Path | None:
    """Return the path, or None if this account has no home directory."""
    # A relative path is invalid by the XDG specification.
    config = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        home = Path(config) if config.startswith("/") else Path.home() / ".config"
    except RuntimeError:
        return None
    return home / "rollout" / "contexts.toml"
