"""The SQL that makes a database of facts: tables with the columns of the contract, and the views of a design."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rollout.workloads.experiment.analysis.columns import EVIDENCE_COLUMNS, FACTS, MANIFEST, MANIFEST_COLUMNS, Columns
from rollout.workloads.experiment.analysis.sources import Pair, Source
from rollout.workloads.experiment.analysis.view_sets import ViewSet, views_sql
from rollout.workloads.experiment.contracts import EVENTS_BYTES_MAX, RunManifest
from rollout.workloads.experiment.layout import EVIDENCE

OBJECT_BYTES_MAX = 2 * EVENTS_BYTES_MAX
"""Maximum size of a row: an event of an agent, with the fields that name its slot."""
Place = Callable[[Path], str]
"""Returns the name of a file in the SQL."""


def text(value: str) -> str:
    """Return a string literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def literal_path(path: str) -> str:
    """Escape a path for `read_json`, which treats *, ? and [ as patterns."""
    return text("".join(f"[{one}]" if one in "*?[" else one for one in path))


def load_sql(
    sources: Sequence[Source], pairs: Sequence[Pair], view_set: ViewSet, place: Place, *, only: bool = False
) -> str:
    """Return idempotent statements that create a database from the facts of `sources`. With `only`, the views of runs
    include the variants of `pairs` alone."""
    return "\n".join([*_tables(sources, pairs, place, only=only), views_sql(view_set)])


def _tables(sources: Sequence[Source], pairs: Sequence[Pair], place: Place, *, only: bool) -> Iterator[str]:
    yield _table("facts_runs", MANIFEST_COLUMNS | {"selected": "BOOLEAN"}, [_run(one, place) for one in sources])
    for name, columns in FACTS.items():
        found = [
            _select(columns, one.facts / f"{name}.jsonl", place, "*" if not one.label else _renamed(one))
            for one in sources
            if (one.facts / f"{name}.jsonl").is_file()
        ]
        yield _table(f"facts_{name}", columns, found)
    records = [one.directory / EVIDENCE for one in sources if one.selected and (one.directory / EVIDENCE).is_file()]
    yield _table("evidence_records", EVIDENCE_COLUMNS, [_select(EVIDENCE_COLUMNS, one, place, "*") for one in records])
    yield _table("pairs", {"baseline_id": "VARCHAR", "variant_id": "VARCHAR"}, _values(pairs))
    chosen = [name for pair in pairs for name in pair]
    yield _shown(chosen if only else [name for one in sources for name in one.variants], only=only)
    yield _score_direction(next(iter(sources)).manifest)


def _shown(names: Iterable[str], *, only: bool) -> str:
    """Return the variants in the views of runs: `names`, and without `only` all others that have trials."""
    others = "" if only else " UNION SELECT variant_id FROM facts_trials"
    named = f"SELECT unnest([{', '.join(map(text, dict.fromkeys(names)))}]::VARCHAR[])"
    return f"CREATE OR REPLACE TABLE shown_variants AS SELECT * FROM ({named}{others}) AS each(variant_id);"


def _score_direction(manifest: RunManifest) -> str:
    """Return SQL with `is_primary`, whether the score is the primary metric, as `PrimaryMetric.is_score` says for any
    trial, and `direction`, which is -1 if the lowest score is the best."""
    metric = manifest.primary_metric
    is_primary = "false"
    if metric.is_score(graded=manifest.graded, objective=None):
        is_primary = "true"
    elif metric.is_score(graded=manifest.graded, objective=metric.name):
        is_primary = f"EXISTS (FROM facts_trials WHERE objective_name = {text(metric.name)})"
    lowest = -1 if metric.direction == "minimize" else 1
    return (
        "CREATE OR REPLACE TABLE score_direction AS SELECT is_primary, CASE WHEN is_primary THEN "
        f"{lowest} ELSE 1 END AS direction FROM (SELECT {is_primary} AS is_primary);"
    )


def _table(name: str, columns: Columns, selects: Sequence[str]) -> str:
    made = ", ".join(f"{column} {kind}" for column, kind in columns.items())
    filled = "".join(f"\nINSERT INTO {name} {select};" for select in selects)
    return f"CREATE OR REPLACE TABLE {name} ({made});{filled}"


def _values(rows: Sequence[Sequence[str]]) -> list[str]:
    listed = ", ".join(f"({', '.join(map(text, row))})" for row in rows)
    return [f"VALUES {listed}"] if rows else []


def _run(source: Source, place: Place) -> str:
    select = _select(MANIFEST_COLUMNS, source.facts / MANIFEST, place, "*", lines=False)
    return select.replace("SELECT *", f"SELECT *, {str(source.selected).lower()}", 1)


def _renamed(source: Source) -> str:
    return f"* REPLACE ({text(f'{source.label}/')} || variant_id AS variant_id)"


def _select(columns: Columns, path: Path, place: Place, what: str, *, lines: bool = True) -> str:
    kinds = ", ".join(f"{column}: {text(kind)}" for column, kind in columns.items())
    form = "newline_delimited" if lines else "unstructured"
    options = f"format = '{form}', maximum_object_size = {OBJECT_BYTES_MAX}, columns = {{{kinds}}}"
    return f"SELECT {what} FROM read_json({literal_path(place(path))}, {options})"
