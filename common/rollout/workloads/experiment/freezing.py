"""Freezes files of an experiment by content: the agent, and what its grader needs."""

from __future__ import annotations

import ast
import asyncio
import shutil
import tarfile
import zipfile
from collections.abc import Collection, Sequence
from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.model.problems import problems
from rollout.objects import tree
from rollout.workloads.code import find_code
from rollout.workloads.experiment.binding_check import binding_faults, parameters_of
from rollout.workloads.experiment.config import VariantKeys

FUNCTION_AGENT = "__rollout_agent__.py"


def freeze(key: str, path: Path, scratch: Path) -> tuple[str, Path]:
    """Return (content id in hex, directory) of a directory, or of an archive unpacked into `scratch`. Raises
    ConfigError if it is missing, unreadable, or neither. Blocking."""
    directory = path
    if path.is_file():
        directory = scratch / key.rpartition(".")[2]
        _unpack(key, path, directory)
    elif not path.is_dir():
        raise ConfigError(f"{key}: {path}: there is no such file or directory")
    try:
        found = asyncio.run(tree.describe(directory, links="follow"))
    except InputError as error:
        raise ConfigError(f"{key}: {error.message}") from error
    if not found.files:
        raise ConfigError(f"{key}: {path} holds no file")
    return found.id.hex(), directory


def freeze_function(
    target: str, variants: Sequence[VariantKeys], leave_out: Collection[Path], scratch: Path
) -> tuple[str, Path]:
    """Freeze a function's code and its caller, as `freeze` does. Raises ConfigError as `find_code` does, or if the
    function does not accept the variants' bindings."""
    faults: list[str] = []

    def check(file: Path, name: str, made: ast.stmt) -> None:
        if (found := parameters_of(made)) is not None:
            faults.extend(binding_faults(name, f"{file.name}:{made.lineno}", found, variants))

    try:
        code = find_code(target, None, leave_out, check=check)
        if code is None:
            raise ConfigError(f"{target} is installed: only code of this directory travels")
    except ConfigError as error:
        raise ConfigError(f"runtime.function: {error.message}") from error
    if faults:
        raise ConfigError(problems(faults))
    directory = scratch / "function"
    for name, path in code.files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, directory / name)
    shutil.copyfile(Path(__file__).with_name("function_agent.py"), directory / FUNCTION_AGENT)
    return freeze("runtime.function", directory, scratch)


def _unpack(key: str, path: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(directory)
        else:
            with tarfile.open(path) as archive:
                archive.extractall(directory, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ConfigError(
            f"{key}: {path} is neither a directory nor an archive that can be unpacked: {error}"
        ) from error
