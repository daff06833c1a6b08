"""Files of training data to values, one a row: JSON Lines, parquet, and what `Dataset.save_to_disk` wrote.

The client reads them to check every row, and a worker reads them again to tokenise it: with this, so that both find the
same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.model.errors import InputError
from rollout.workloads import tables
from rollout.workloads.input_files import InputFile
from rollout.workloads.input_lines import fail, json_of, lines_of

INSTRUCTION = "instruction.md"


def values_of(kind: str, name: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line, or row of a table, from 1; its value), in order. `name` is the file's name for users.

    Raises InputError if the file cannot be read to its end, or a line is not JSON.
    """
    if kind == "jsonl_path":
        for line in lines_of(InputFile(name, path)):
            yield line.line, json_of(line)
    else:
        yield from enumerate(table_rows(kind, name, path), 1)


def table_rows(kind: str, name: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows of a parquet file or of a dataset on disk, as `tables.table_rows` does; of tasks, their
    instructions."""
    if kind == "tasks_path":
        yield from task_rows(name, path)
        return
    for line in tables.table_rows("parquet" if kind == "parquet_path" else "dataset", InputFile(name, path), {}):
        if line.fault:
            fail(name, line.line, line.fault)
        yield json_of(line)


def task_rows(name: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each task below `path`, or for `path` itself: its instruction, or that of its first step."""
    found = instructions(path)
    for file in found:
        task = Path(name).name if found == [file] and file.parent == path else file.relative_to(path).parts[0]
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name}: {file.relative_to(path)} cannot be read: {error}") from error
        yield {"prompt": [{"role": "user", "content": text}], "task": task}


def instructions(path: Path) -> list[Path]:
    """Return the instruction file of each task below `path`, ordered by name, or of `path` itself."""

    def of(task: Path) -> list[Path]:
        own = [one for one in [task / INSTRUCTION] if one.is_file()]
        return own or sorted(task.glob(f"steps/*/{INSTRUCTION}"))[:1]

    entries = (one for one in sorted(path.iterdir()) if one.is_dir() and not one.name.startswith("."))
    return of(path) or [file for one in entries for file in of(one)]
