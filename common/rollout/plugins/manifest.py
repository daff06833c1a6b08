"""`rollout-plugin.toml`: what a plugin is, how it is started, and what it may reach."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, Literal, cast

from blake3 import blake3
from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rollout.config.load import load_settings
from rollout.config.section import Section
from rollout.model.errors import ConfigError

FILE_NAME = "rollout-plugin.toml"
_ALIASES = {"pyo3": "python", "rust-cdylib": "cdylib"}
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

Mode = Literal["python", "sidecar", "cdylib"]


class Runtime(Section):
    python_min: str = Field(default="3.11", pattern=r"^3\.\d+$", description="Oldest Python the plugin runs on.")
    gpu: bool = Field(default=False, description="The plugin wants a GPU to itself.")
    memory_mib: int = Field(
        default=0, ge=0, le=1 << 40, description="Memory it needs at most, for scheduling; 0: unknown."
    )
    concurrency: int = Field(default=1, ge=1, le=1024, description="Calls it takes at once.")


class PythonEntry(Section):
    module: str = Field(min_length=1, description="Module to import.")
    factory: str = Field(default="", description="Function that makes the plugin; empty: the module itself.")
    path: str = Field(default=".", description="Directory put on sys.path, relative to the manifest.")

    @field_validator("module")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _MODULE.fullmatch(value):
            raise ValueError(f'must be a dotted module name such as "my_plugin.rewards", not "{value}"')
        return value


class SidecarEntry(Section):
    command: list[str] = Field(
        min_length=1, description="Program and arguments, run in the manifest's directory; \"python\": the worker's."
    )
    protocol: Literal["json", "grpc"] = Field(default="json", description="What it speaks on its Unix socket.")
    script: str = Field(default="", description="The file that a hash pins, relative to the manifest.")


class CdylibEntry(Section):
    path: str = Field(min_length=1, description="Shared library, relative to the manifest.")


class Entry(Section):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    python: PythonEntry | None = None
    sidecar: SidecarEntry | None = None
    cdylib: CdylibEntry | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {_ALIASES.get(key, key): table for key, table in cast("dict[str, Any]", value).items()}


class Example(Section):
    """A call that `python -m rollout.plugins.check` makes."""

    method: str = Field(min_length=1, description="Method to call.")
    payload: dict[str, Any] = Field(default_factory=dict[str, Any], description="Its arguments.")
    expect: Any = Field(default=None, description="What it must return; absent: anything of the right type.")


class Manifest(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Items require a plugin by this name.")
    version: str = Field(min_length=1, description="Of the plugin; a sidecar must report the same.")
    kind: Literal["env-harness", "reward", "tool", "other"] = Field(description="What may be asked of it.")
    mode: Mode = Field(description="python (alias pyo3), sidecar or cdylib (alias rust-cdylib).")
    trait_id: str = Field(default="", description="Accepted and not used.")
    network_allowlist: list[str] = Field(
        default_factory=list[str], description="Hosts it may reach; refused where it cannot be enforced."
    )
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$", description="Hash of the entry's file.")
    blake3: str = Field(default="", pattern=r"^([0-9a-f]{64})?$", description="Hash of the entry's file.")
    runtime: Runtime = Runtime()
    entry: Entry
    config: dict[str, Any] = Field(default_factory=dict[str, Any], description="Passed to the plugin as it is.")
    examples: list[Example] = Field(default_factory=list[Example], description="Calls to check it with.")

    _path: Path = PrivateAttr(default=Path(FILE_NAME))

    @field_validator("mode", mode="before")
    @classmethod
    def _older_modes(cls, value: Any) -> Any:
        return _ALIASES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if getattr(self.entry, self.mode) is None:
            raise ValueError(f'mode = "{self.mode}" needs a table [entry.{self.mode}]')
        if self.mode == "python" and tuple(map(int, self.runtime.python_min.split("."))) < (3, 11):
            raise ValueError(f'runtime.python_min = "{self.runtime.python_min}" is too old: at least "3.11"')
        if self.mode == "cdylib" and self.runtime.concurrency != 1:
            raise ValueError("runtime.concurrency must be 1 for a cdylib: its call function is not re-entered")
        if (self.sha256 or self.blake3) and self.mode == "sidecar" and not (self.entry.sidecar or _NO).script:
            raise ValueError("a sidecar pinned by hash must name the pinned file: set entry.sidecar.script")
        return self

    @property
    def path(self) -> Path:
        """The manifest's own file, absolute."""
        return self._path

    @property
    def directory(self) -> Path:
        return self._path.parent

    @property
    def entry_file(self) -> Path | None:
        """What the hash pins: the library, the sidecar's script, the module's source if it lies beside the manifest."""
        if self.entry.cdylib is not None and self.mode == "cdylib":
            return self.directory / self.entry.cdylib.path
        if self.entry.sidecar is not None and self.mode == "sidecar":
            return self.directory / self.entry.sidecar.script if self.entry.sidecar.script else None
        assert self.entry.python is not None
        base = self.directory / self.entry.python.path / Path(*self.entry.python.module.split("."))
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


_NO = SidecarEntry(command=["none"])


def load_manifest(path: str | Path) -> Manifest:
    """Return the checked manifest at `path` or in the directory `path`. Raises ConfigError with file, line and
    remedy."""
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    manifest = load_settings(Manifest, path, environ={})
    manifest._path = path.resolve()  # pyright: ignore[reportPrivateUsage]
    return manifest


def verify_pin(manifest: Manifest) -> None:
    """Raise ConfigError unless the entry's file has the manifest's hashes. Blocking."""
    pins = [("sha256", manifest.sha256, hashlib.sha256), ("blake3", manifest.blake3, blake3)]
    wanted = [(name, pin, make) for name, pin, make in pins if pin]
    if not wanted:
        return
    file = manifest.entry_file
    if file is None or not file.is_file():
        raise ConfigError(
            f"{manifest.path}: the pinned file {file or 'of the module'} is not there, so it cannot match"
        )
    data = file.read_bytes()
    for name, pin, make in wanted:
        found = make(data).hexdigest()
        if found != pin:
            raise ConfigError(
                f"{manifest.path}: {name} pins {file.name} to {pin[:16]}..., the file hashes to {found[:16]}...: "
                "restore the file, or review the change and pin the new hash"
            )
