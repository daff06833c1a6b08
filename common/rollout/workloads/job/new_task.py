"""A first task that can be checked and solved as it is, in which the parts to change are easy to see."""

from __future__ import annotations

from pathlib import Path

from rollout.model.errors import ConfigError
from rollout.workloads.job.dialect import DialectName
from rollout.workloads.job.names import portable_name

_HEAD: dict[DialectName, str] = {
    "rollout": """\
version = "1.0"
dialect = "rollout"              # the format; Harbor's tasks may say version = "1.0", too
""",
    "harbor": """\
schema_version = "1.4"           # of Harbor's format
""",
}
_NAMED = """
[task]
name = "{name}"
"""
_TOML = """
[metadata]
difficulty = "easy"

[agent]
timeout_sec = 600                # to do the task

[verifier]
timeout_sec = 120                # to run tests/test.sh

[environment]                    # environment/Dockerfile is built, unless docker_image = "debian:bookworm-slim"
cpus = 1
{memory}
workdir = "/app"                 # where agent, solution and tests begin
"""
_SIZES: dict[DialectName, str] = {
    "rollout": 'memory = "1G"\nstorage = "2G"',
    "harbor": "memory_mb = 1024\nstorage_mb = 2048",
}
_INSTRUCTION = """\
Write a file `/app/hello.txt` that holds the one line

    Hello, world!
"""
_DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
"""
_TEST = """\
#!/bin/bash
# Run after the agent. /logs/verifier/reward.txt must then hold a number, whatever the agent did: 1 passes.
reward=0
if [ "$(cat /app/hello.txt)" = "Hello, world!" ]; then
    reward=1
else
    echo "/app/hello.txt does not hold the line" >&2
fi
echo "$reward" > /logs/verifier/reward.txt
"""
_SOLUTION = """\
#!/bin/bash
# Run by the agent `oracle`, to show that the task can be done and that its test sees it.
echo "Hello, world!" > /app/hello.txt
"""
PACKAGE = r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*"
"""Pattern of a package name, `org/name`."""


def task_files(dialect: DialectName, package: str | None) -> dict[str, tuple[str, bool]]:
    """Return (text, executable) by path below the task. `package` is the `org/name` of [task]."""
    toml = _HEAD[dialect] + (_NAMED.format(name=package) if package else "")
    return {
        "task.toml": (toml + _TOML.format(memory=_SIZES[dialect]), False),
        "instruction.md": (_INSTRUCTION, False),
        "environment/Dockerfile": (_DOCKERFILE, False),
        "tests/test.sh": (_TEST, True),
        "solution/solve.sh": (_SOLUTION, True),
    }


def write_task(directory: Path, dialect: DialectName, package: str | None = None) -> list[Path]:
    """Create a task in `directory`, which must be missing or empty, and return the files.

    Raises ConfigError if it is not empty or cannot be written. Nothing is overwritten.
    """
    try:
        portable_name(directory.resolve().name)
    except ValueError as error:
        raise ConfigError(f"{directory}: the directory's name is the task's: {error}") from error
    files = task_files(dialect, package)
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if there := sorted(path.name for path in directory.iterdir())[:3]:
            raise ConfigError(
                f"{directory} is not empty (it holds {', '.join(there)}, for example): name a new directory; nothing "
                "was written"
            )
        for name, (text, executable) in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
            if executable:
                path.chmod(path.stat().st_mode | 0o111)
            written.append(path)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or error
        raise ConfigError(f"cannot make a task of {directory}: {why}") from error
    return written
