"""What a policy said, page by page, from an object of samples."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.client import Runs
from rollout.model.errors import InvalidResultError, NotFoundError
from rollout.model.ids import short
from rollout.ui.page import Page, Section
from rollout.ui.views import Reading
from rollout.workloads.train.samples import read_samples

_PAGE = 20
_FRESH_S = 600.0


async def samples_view(reading: Reading, run_id: str, object_id: str, *, start: int = 0) -> Page:
    """NotFoundError."""

    async def ask(client: Runs) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="rollout-ui-") as scratch:
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


def object_named(text: str) -> bytes:
    """NotFoundError: no object is called so."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise NotFoundError(f"{text[:80]!r} is no object") from None
