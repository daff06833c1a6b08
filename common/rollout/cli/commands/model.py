"""`rollout model`: makes small models for experiments."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.cli.program import new_app
from rollout.model.errors import ConfigError, InputError

app = new_app(help="Make models for experiments.")

_TINY = "rollout_worker.backends.tiny"


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Make models for experiments."""


@app.command("make-tiny")
def make_tiny(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory to write.")],
    seed: Annotated[int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Seed of the weights.")] = 0,
) -> None:
    """Make a tiny random model for demos and tests, with tokenizer and chat template, which every engine loads."""
    if directory.is_file():
        raise InputError(f"{directory} is a file: name a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "config.json").is_file():
        raise InputError(f"{directory} is not empty and holds no model: name another directory")
    make: Any = _maker()
    make(directory, seed)
    typer.echo(f"{directory}: tiny model made (seed {seed})")


def _maker() -> Any:
    try:
        # By name: engines are the worker's business, this package imports none of them.
        return importlib.import_module(_TINY).make_tiny
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("rollout_worker"):
            raise ConfigError("the worker part of rollout is not installed: pip install rollout-engine") from error
        raise ConfigError(
            f'this needs the Python package {error.name}: pip install "rollout-engine[transformers]"'
        ) from error
