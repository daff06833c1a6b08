"""Local directories that a run's workers need: identified by content before the run is opened, uploaded afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rollout.objects import tree
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.port import Tree

if TYPE_CHECKING:
    from rollout.client.runs import Runs

_TELL_EVERY_S = 2.0


async def name_trees(config: JsonObject, trees: Sequence[Tree], report: Callable[[str], None]) -> None:
    """Put the content id of each tree that has none yet into `config`, under its key. Raises InputError if it is
    unreadable."""
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
    """Upload what the cluster lacks of each tree that `config` names. The run must be open. `report` is called if that
    takes longer. Raises InputError if a tree has changed."""
    named = [(one, bytes.fromhex(name)) for one in trees if (name := lookup(config, one.key))]
    told = time.monotonic()
    for number, (one, name) in enumerate(named, 1):

        def progress(done: int, total: int, path: Path = one.path, number: int = number) -> None:
            nonlocal told
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                of = f" ({number:,} of {len(named):,} directories)" if len(named) > 1 else ""
                report(f"uploading {path.name}: {done >> 20} of {total >> 20} MiB{of}")

        await runs.upload_tree(run_id, one.path, progress, files=one.files, expected=name)
