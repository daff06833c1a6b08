"""Finds facts of a run that were changed after they were written, so that no edit goes unnoticed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rollout.workloads.experiment.analysis.sources import Source
from rollout.workloads.experiment.layout import FACTS
from rollout.workloads.output import changed_files

Rows = Callable[[str], list[tuple[Any, ...]]]
"""Runs a statement and returns its rows."""
_SLOTS = """
SELECT run_id, schedule_index, count(*) FROM facts_trials GROUP BY ALL HAVING count(*) > 1 ORDER BY ALL LIMIT 1
"""
_RUNS = """
SELECT run_id, count(*) FROM facts_trials WHERE run_id IS NULL OR run_id NOT IN (SELECT run_id FROM facts_runs)
GROUP BY ALL ORDER BY ALL LIMIT 1
"""
_VARIANTS = """
SELECT t.variant_id, count(*) FROM facts_trials t JOIN facts_runs r ON r.run_id = t.run_id
WHERE r.selected GROUP BY ALL ORDER BY ALL
"""
_COUNTS = """
SELECT r.run_id, count(*), any_value(r.total_slots) FROM facts_trials t JOIN facts_runs r ON r.run_id = t.run_id
GROUP BY ALL HAVING count(*) > any_value(r.total_slots) ORDER BY ALL LIMIT 1
"""


def doubts(rows: Rows, sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for each doubt. `rows` queries the database into which the facts were read. Raises OSError.
    Blocking."""
    for one in sources:
        if one.selected and one.facts.parent == one.directory:
            for fault in changed_files(one.directory, FACTS):
                yield f"{fault}: `rollout experiment continue {shlex.quote(str(one.directory))}` writes it anew"
    for run_id, slot, count in rows(_SLOTS):
        yield f"trials.jsonl: slot {slot} of run {run_id} stands {count} times: each of them counts"
    for run_id, count in rows(_RUNS):
        yield f"trials.jsonl: {count} rows are of another run, {run_id}: they do not count"
    for run_id, count, total in rows(_COUNTS):
        yield f"trials.jsonl: {count} rows of run {run_id}, which has {total} slots"
    known = {variant for one in sources for variant in one.variants}
    for variant, count in rows(_VARIANTS):
        if variant not in known:
            yield f"trials.jsonl: {count} rows are of {variant}, which is no variant of the run"
