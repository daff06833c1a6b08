"""Shows objects of the cluster: samples of a policy, and files that trials and tests left."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.client import Runs
from rollout.config.scratch import Scratch
from rollout.model.errors import InvalidResultError, NotFoundError
from rollout.model.ids import short
from rollout.ui.page import Page, Section
from rollout.ui.views import Reading
from rollout.workloads.train.samples import read_samples

_PAGE = 20
_MEMBERS = 2_000
_SHOWN = 256 << 10
_FRESH_S = 600.0


async def samples_view(reading: Reading, run_id: str, object_id: str, *, start: int = 0) -> Page:
    """Show the samples in an object. Raises NotFoundError."""

    async def ask(client: Runs) -> list[dict[str, Any]]:
        with Scratch("rollout-ui-objects-") as scratch:
            path = Path(scratch) / "samples"
            await client.download(run_id, object_named(object_id), path)
            try:
                return list(islice(read_samples(path), start, start + _PAGE + 1))
            except InvalidResultError as error:
                raise NotFoundError(f"these are no samples: {error.message}") from error

    found = await reading.cluster.shared(("samples", run_id, object_id, start), ask, _FRESH_S)
    data = {
        "samples": found[:_PAGE],
        "start": start,
        "page": _PAGE,
        "more": len(found) > _PAGE,
        "path": f"/runs/{run_id}/samples/{object_id}",
    }
    trail = [("Runs", "/"), (short(run_id), f"/runs/{run_id}")]
    return Page("Samples", [Section("sample", data)], trail, live=False)


async def files_view(reading: Reading, run_id: str, object_id: str, name: str = "") -> Page:
    """Show the files in a tar, or one of them. Raises NotFoundError."""

    async def ask(client: Runs) -> _Listing | _Member:
        with Scratch("rollout-ui-objects-") as scratch:
            path = Path(scratch) / "files.tar"
            await client.download(run_id, object_named(object_id), path)
            return await asyncio.to_thread(_read, path, name)

    found = await reading.cluster.shared(("files", run_id, object_id, name), ask, _FRESH_S)
    path = f"/runs/{run_id}/files/{object_id}"
    trail = [("Runs", "/"), (short(run_id), f"/runs/{run_id}")]
    if isinstance(found, _Listing):
        data: dict[str, Any] = {"members": found.members, "more": found.more, "path": path}
        return Page("Files", [Section("members", data)], trail, live=False)
    try:
        content, binary = found.data.decode(), False
    except UnicodeDecodeError as error:
        content, binary = found.data[: error.start].decode(), error.start < len(found.data) - 4
    data = {
        "content": content, "binary": binary, "size": found.size, "shown": len(found.data),
        "cut": found.size > len(found.data), "path": path,
    }  # fmt: skip
    return Page(name, [Section("member", data)], [*trail, ("Files", path)], live=False)


@dataclass(frozen=True, slots=True)
class _Listing:
    members: Sequence[tuple[str, int]]
    more: int


@dataclass(frozen=True, slots=True)
class _Member:
    data: bytes
    size: int


def _read(path: Path, name: str) -> _Listing | _Member:
    try:
        with tarfile.open(path) as archive:
            if not name:
                files = [(member.name, member.size) for member in archive if member.isfile()]
                return _Listing(files[:_MEMBERS], max(0, len(files) - _MEMBERS))
            for member in archive:
                if member.name == name and member.isfile() and (file := archive.extractfile(member)) is not None:
                    return _Member(file.read(_SHOWN), member.size)
    except tarfile.TarError as error:
        raise NotFoundError(f"this is no archive: {error}") from error
    raise NotFoundError(f"the archive has no file {name[:200]!r}")


def object_named(text: str) -> bytes:
    """Parse the id of an object. Raises NotFoundError."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise NotFoundError(f"{text[:80]!r} is no object") from None
