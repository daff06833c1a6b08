"""The files of a task directory: which must exist, which must not, and their checksum."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollout.objects.digest import hash_file
from rollout.objects.tree import Tree, TreeFile
from rollout.workloads.job.task import BUILD_FILE, ENVIRONMENT, Environment, Step, Task

CONFIG = "task.toml"
SOLUTIONS = ("solution", "oracle")
"""Directory names of the reference solution: Harbor's, and that of the older format."""
_LEFT_OUT = frozenset({".git"})


@dataclass(slots=True)
class Files:
    """`checksum` is that of `rollout.objects.tree`: names, contents and executable bits, without times; "" with
    faults."""

    checksum: str = ""
    size: int = 0
    count: int = 0
    faults: list[str] = field(default_factory=list[str])


def scan(directory: Path) -> Files:
    """Check every file below `directory`. What cannot be copied to another machine unchanged is a fault."""
    found = Files()
    files = list[TreeFile]()
    for name, path in _walk(directory, directory.resolve(), "", (), found.faults):
        try:
            digest, size = hash_file(path)
        except OSError as error:
            found.faults.append(f"{path}: cannot be read: {error.strerror or error}")
            continue
        files.append(TreeFile(name, size, digest, os.access(path, os.X_OK)))
    tree = Tree(tuple(sorted(files)))
    found.size, found.count = tree.size, len(files)
    if not found.faults:
        found.checksum = tree.id.hex()
    return found


def _walk(at: Path, root: Path, prefix: str, above: tuple[Path, ...], faults: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of every file, following links that stay inside."""
    above = (*above, at.resolve())
    try:
        entries = sorted(at.iterdir())
    except OSError as error:
        faults.append(f"{at}: cannot be read: {error.strerror or error}")
        return
    for entry in entries:
        if entry.name in _LEFT_OUT:
            continue
        fault, real = _entry_fault(entry, root)
        if fault:
            faults.append(fault)
        elif real.is_dir():
            if real in above:
                faults.append(f"{ascii_safe(entry)}: a link to a directory above it, so it never ends: remove it")
            else:
                yield from _walk(entry, root, f"{prefix}{entry.name}/", above, faults)
        else:
            yield prefix + entry.name, entry


def _entry_fault(entry: Path, root: Path) -> tuple[str, Path]:
    """Return (fault, the file or directory it resolves to)."""
    shown = ascii_safe(entry)
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        return f"{shown}: the name is not UTF-8: rename it", entry
    if "\\" in entry.name or any(ord(c) < 32 for c in entry.name):
        return f"{shown}: a backslash or control character in a name cannot travel: rename it", entry
    try:
        real = entry.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: Python 3.11 and 3.12 on a circle of links
        where = f"the link leads nowhere ({entry.readlink()})" if entry.is_symlink() else f"cannot be read: {error}"
        return f"{shown}: {where}", entry
    if not real.is_relative_to(root):
        return f"{shown}: the link leads out of the task: put a copy in its place", entry
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        return f"{shown}: neither a file nor a directory: remove it", entry
    return "", real


def ascii_safe(path: Path) -> str:
    """Format a path for a message, even if its name is not valid text."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def missing_files(task: Task, *, verify: bool, oracle: bool) -> Iterator[str]:
    """Yield a fault for each missing file. `verify`: the task is verified. `oracle`: its solution runs."""
    if task.environment.os != "linux":
        yield f"{task.directory / CONFIG}: environment.os: there is no provider of {task.environment.os} sandboxes"
        return
    yield from _environment_faults(task.environment, task.directory)
    for step in task.steps:
        yield from _step_faults(step, task.directory, verify=verify, oracle=oracle)
    both = [name for name in SOLUTIONS if (task.directory / name).is_dir()]
    if len(both) > 1:
        yield f"{task.directory}: both solution/ and oracle/ are there: keep one"


def _environment_faults(environment: Environment, directory: Path) -> Iterator[str]:
    if environment.build == ENVIRONMENT and not (directory / ENVIRONMENT / BUILD_FILE).is_file():
        yield (
            f"{directory}: there is no {ENVIRONMENT}/Dockerfile: add it, or name an image with docker_image under "
            f"[environment] of {CONFIG}"
        )


def _step_faults(step: Step, directory: Path, *, verify: bool, oracle: bool) -> Iterator[str]:
    yield from _text_fault(directory / step.instruction)
    if verify and not any((directory / tests / "test.sh").is_file() for tests in step.tests):
        expected = " or ".join(f"{tests}/test.sh" for tests in step.tests)
        yield f"{directory}: there is no {expected}, which verifies what the agent did: add it"
    solve = None if step.solution is None else directory / step.solution / "solve.sh"
    if oracle and (solve is None or not solve.is_file()):
        where = step.solution or (f"steps/{step.name}/solution" if step.name else "solution")
        yield f"{directory}: there is no {where}/solve.sh, which the agent oracle runs: add it, or leave that agent out"


def _text_fault(path: Path) -> Iterator[str]:
    """Yield a fault if an instruction is missing, is not text, or is empty."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        yield f"{path}: no such file: it says what the agent is to do"
    except UnicodeDecodeError:
        yield f"{path}: not UTF-8 text: save the file as UTF-8"
    except (OSError, RuntimeError) as error:
        yield f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
    else:
        if not text.strip():
            yield f"{path}: empty: it says what the agent is to do"
