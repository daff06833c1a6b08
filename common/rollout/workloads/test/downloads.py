"""Writes files that tests left below the output directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from rollout.snapshots.tar import unpack
from rollout.workloads.port import Fetch

DOWNLOADS = "downloads"


async def download(object_id: bytes, directory: Path, fetch: Fetch) -> None:
    """Write the files of the object to `downloads` in `directory`, replacing files of the same names."""
    files = directory / f".{object_id.hex()[:16]}"
    archive = files.with_suffix(".tar")
    try:
        await fetch(object_id, archive)
        await asyncio.to_thread(shutil.rmtree, files, ignore_errors=True)
        await asyncio.to_thread(unpack, archive, files, object_id)
        await asyncio.to_thread(_lay_over, files, directory / DOWNLOADS)
    finally:
        await asyncio.to_thread(archive.unlink, missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, files, ignore_errors=True)


def _lay_over(files: Path, target: Path) -> None:
    """Move files into place. A file replaces a directory of the same name, and the reverse."""
    target.mkdir(parents=True, exist_ok=True)
    for path in files.iterdir():
        there = target / path.name
        if there.exists() and path.is_dir() != there.is_dir():
            shutil.rmtree(there) if there.is_dir() else there.unlink()
        if path.is_dir():
            _lay_over(path, there)
        else:
            shutil.copyfile(path, there)
