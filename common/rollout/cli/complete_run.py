"""A run that is already complete: makes what is made of its results once, and tells the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout.cli.asking import reached
from rollout.cli.words import unsuccessful
from rollout.cli.work import PATIENCE_S, Work
from rollout.client.private import state_of
from rollout.model.errors import NotFoundError
from rollout.model.ids import short
from rollout.workloads.json_form import JsonObject, lookup
from rollout.workloads.output_place import OutputPlace


async def complete(
    work: Work, place: OutputPlace, note: Callable[[str], None], run_id: str, config: JsonObject, summary: JsonObject
) -> None:
    """Finish the files of a run that was completed and collected.

    They may be missing because an earlier command ended too early, because somebody deleted them, or because they were
    not requested then. `note` does not repeat itself.
    """
    workload, target = work.workload, work.target

    async def fetch(object_id: bytes, path: Path) -> None:
        if work.is_private and state_of(place.directory) is None:
            raise NotFoundError(f"its private cluster, {target.private}, was deleted")
        async with reached(target, note, patience_s=PATIENCE_S) as (runs, _):
            await runs.download(run_id, object_id, path)

    made = await workload.finished(fetch, config, place.directory, summary, work.display.note)
    await place.publish(summary[workload.unit]["committed"])
    files = place.files(workload.result_files, made)
    also = f"; made now: {', '.join(made)}" if made else ""
    if lookup(config, "input.queue"):
        also += "\nits intake has ended: to take further rows, name another output directory"
    work.display.event("summary", _text(work, place, summary) + also, **summary, files=files)


def _text(work: Work, place: OutputPlace, summary: JsonObject) -> str:
    workload = work.workload
    units = summary[workload.unit]
    results = Path(workload.result_files[0]).stem
    outcome = workload.outcome(summary) or (
        f"{units['completed']} {results}, {unsuccessful(units['failed'], units['invalid'])}"
    )
    first, *others = outcome.split("\n")
    said = f"run {short(summary['run_id'])} is complete already: {first}, in {place.shown}"
    return "\n".join([said, *others])
