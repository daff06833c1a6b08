"""Files that tests left in a copy of the project, for the output directory of their run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pathspec
from rollout.snapshots.tar import pack

from rollout_worker.testing.place import Place

FILES_MAX = 1000


async def gather(place: Place, globs: Sequence[str], put: Callable[[Path], Awaitable[bytes]]) -> bytes | None:
    """Store the matching files as a tar through `put`, and return the object's id, or None if there are none.

    At most FILES_MAX are taken, in order of their names. Raises SandboxError and OSError.
    """
    spec = pathspec.GitIgnoreSpec.from_lines(["/" + one.removeprefix("./") for one in globs])
    names = sorted(name for name in await place.files() if spec.match_file(name))[:FILES_MAX]
    if not names:
        return None
    with TemporaryDirectory(prefix="rollout-download-") as scratch:
        files, archive = Path(scratch, "files"), Path(scratch, "files.tar")
        for name in names:
            (files / name).parent.mkdir(parents=True, exist_ok=True)
            await place.fetch(name, files / name)
        await asyncio.to_thread(pack, files, archive)
        return await put(archive)
