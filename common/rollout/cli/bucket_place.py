"""Place of a command's results in a bucket, which the command holds while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from rollout.cli.work import Work
from rollout.workloads.output import OutputDirectory
from rollout.workloads.output_place import OutputPlace
from rollout.workloads.port import cloud_of
from rollout.workloads.publishing import BucketOutput


@asynccontextmanager
async def in_bucket(work: Work, output: OutputDirectory, note: Callable[[str], None]) -> AsyncGenerator[OutputPlace]:
    """Hold the bucket's place if results go to one.

    `note` does not repeat itself. Raises StateError if another command writes there, and StorageUnavailableError.
    """
    url = work.workload.bucket(work.settings)
    if url is None:
        yield OutputPlace(output.path)
        return
    remote = BucketOutput(
        url,
        output.path,
        cloud_of(work.settings),
        work.workload.result_files,
        command=work.options.command(),
        tell=work.display.step,
        note=note,
    )
    work.display.note(f"results are collected in {output.path}, and uploaded to {url} from there")
    try:
        await remote.open(resume=work.options.resume is not None, private=work.is_private)
        yield remote
    finally:
        await asyncio.shield(remote.close())
