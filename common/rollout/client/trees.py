"""Local directories that a run's workers need: named by their content before the run is opened, uploaded after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollout.objects import tree
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.port import Tree

if TYPE_CHECKING:
    from rollout.client.runs import Runs


async def name_trees(config: JsonObject, trees: Sequence[Tree], report: Callable[[str], None]) -> None:
    """Put the content id of each tree that has none yet into `config`, under its key. InputError: not readable."""
    for one in trees:
        if lookup(config, one.key):
            continue
        report(f"hashing {one.path}")
        *sections, key = one.key.split(".")
        table = config
        for section in sections:
            table = cast(JsonObject, table[section])
        table[key] = (await tree.describe(one.path, links="follow", files=one.files)).id.hex()


async def upload_trees(
    runs: Runs, run_id: str, config: JsonObject, trees: Sequence[Tree], report: Callable[[str], None]
) -> None:
    """What the cluster lacks of each tree that `config` names. The run must be open. InputError: it is another now."""
    for one in trees:

        def progress(done: int, total: int, path: Path = one.path) -> None:
            size = f"{done >> 20} of {total >> 20} MiB" if total >> 20 else f"{-(-total // 1024)} KiB"
            report(f"uploading {path.name}: {size}")

        name = lookup(config, one.key)
        if name:
            await runs.upload_tree(run_id, one.path, progress, files=one.files, expected=bytes.fromhex(name))
