"""Writes a run as one self-contained HTML file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from rollout.ui.cluster import Cluster
from rollout.ui.digests import Digests
from rollout.ui.page import Page, asset, environment, nowhere, render
from rollout.ui.views import Reading, run_view, status_of

_POLL_S = 0.1
_SILENT_S = 2.0


async def whole_run(cluster: Cluster, run_id: str, tell: Callable[[str], None]) -> Page:
    """Return a page with all results of the run. Raises NotFoundError."""
    digests = Digests(cluster)
    reading = Reading(cluster, digests)
    try:
        await run_view(reading, run_id)
        began = told = asyncio.get_running_loop().time()
        while not digests.is_read(await status_of(reading, run_id)):
            await asyncio.sleep(_POLL_S)
            now = asyncio.get_running_loop().time()
            if now - began > _SILENT_S and now - told > _SILENT_S:
                tell(f"reading results: {digests.read(run_id):,}")
                told = now
        return await run_view(reading, run_id)
    finally:
        await digests.close()


def report_html(page: Page, cluster: str) -> str:
    """Return `page` with everything that it needs embedded."""
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            sections=[(section.id, render(section, nowhere)) for section in page.sections],
            styles=asset("uplot.css") + asset("page.css"),
            scripts=asset("language.js") + asset("uplot.js") + asset("page.js"),
            cluster=cluster,
            at=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        )
    )
