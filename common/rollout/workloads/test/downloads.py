"""Files that tests left, below the output directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from rollout.snapshots.tar import unpack
from rollout.workloads.port import Fetch

DOWNLOADS = "downloads"


async def download(object_id: bytes, directory: Path, fetch: Fetch) -> None:
    """The files of the object go to `downloads` of `directory`, in place of those that have their names."""
    files = directory / f".{object_id.hex()[:16]}"
    archive = files.with_suffix(".tar")
    try:
        await fetch(object_id, archive)
        await asyncio.to_thread(shutil.rmtree, files, ignore_errors=True)
        await asyncio.to_thread(unpack, archive, files, object_id)
        await asyncio.to_thread(shutil.copytree, files, directory / DOWNLOADS, dirs_exist_ok=True)
    finally:
        await asyncio.to_thread(archive.unlink, missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, files, ignore_errors=True)
