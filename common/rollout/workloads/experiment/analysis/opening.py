"""Opens a database of the facts of the runs that the user names, and selects what to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.model.errors import ConfigError, StorageError
from rollout.workloads.experiment.analysis.database import Database, open_database
from rollout.workloads.experiment.analysis.load import load_sql
from rollout.workloads.experiment.analysis.manifest import facts_of
from rollout.workloads.experiment.analysis.other_runs import Keys, source_at
from rollout.workloads.experiment.analysis.sources import Pair, Source, pairs_of, project, siblings, two_sources
from rollout.workloads.experiment.analysis.summary import Analysis, analyze
from rollout.workloads.experiment.analysis.view_sets import ViewSet, view_set_of
from rollout.workloads.experiment.contracts import RunManifest
from rollout.workloads.output import write_atomically

DATABASE = "analysis/agentlab.duckdb"
SCRIPT = "analysis/load_duckdb.sql"
"""Makes the views of DATABASE from the facts, run in the directory of the run:
`duckdb analysis/agentlab.duckdb < analysis/load_duckdb.sql`."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open database. `sources` are the runs asked about."""

    database: Database
    sources: tuple[Source, ...]
    pairs: tuple[Pair, ...]

    def analyze(self, margin: float | None = None) -> Analysis:
        """Analyze the runs. Raises ConfigError if they are all runs of a project."""
        if self.database.view_set is ViewSet.PROJECT:
            raise ConfigError("this is a directory of runs: name one of them, or two to compare")
        return analyze(self.database, self.sources, self.pairs, margin)

    @property
    def manifests(self) -> list[RunManifest]:
        return [one.manifest for one in self.sources]


@contextmanager
def opened(
    a: Path, b: Path | None = None, *, variants: Sequence[str] = (), keys: Keys | None = None, keep: bool = False
) -> Generator[Opened]:
    """Open one run, two runs to compare or, if `a` is a directory of runs, all runs of a project.

    For one run, `variants` are the baseline and the variant to compare; for two, those of `two_sources`. The views are
    then limited to them. With `keep`, DATABASE and SCRIPT, with all variants, are written to the directory of an
    experiment's run.

    Raises ConfigError if a path is not a run or there is no such variant, InputError if facts are damaged.
    """
    with TemporaryDirectory(prefix="rollout-runs-") as scratch:
        if b is not None and b.resolve() != a.resolve():
            first, second = (source_at(path, Path(scratch), keys or Keys()) for path in (a, b))
            if first.manifest.run_id == second.manifest.run_id:
                raise ConfigError(f"{a} and {b} are copies of one run: {first.manifest.run_id}")
            asked, pairs = two_sources(first, second, variants)
            with open_database(asked, pairs, view_set_of("paired", 2), only=bool(variants)) as database:
                yield Opened(database, tuple(asked), tuple(pairs))
            return
        if facts_of(a) is None and (runs := project(a)):
            with open_database(runs, [], ViewSet.PROJECT) as database:
                yield Opened(database, tuple(runs), ())
            return
        source = source_at(a, Path(scratch), keys or Keys())
        pairs = _chosen(source, variants)
        view_set = view_set_of(source.manifest.design.comparison, len(source.manifest.variants))
        loaded = [source, *(siblings(source) if view_set is ViewSet.REGRESSION else ())]
        keep = keep and not variants and source.facts.parent == source.directory
        kept = source.directory / DATABASE if keep else None
        if kept is not None:
            _write_script(source, pairs, view_set)
        with open_database(loaded, pairs, view_set, only=bool(variants), keep=kept) as database:
            yield Opened(database, (source,), tuple(pairs))


def _chosen(source: Source, variants: Sequence[str]) -> list[Pair]:
    if not variants:
        return pairs_of(source)
    has = [one.variant_id for one in source.manifest.variants]
    unknown = [name for name in variants if name not in has]
    if unknown:
        raise ConfigError(f"{source.manifest.name} has no variant {', '.join(unknown)}; it has {', '.join(has)}")
    if len(variants) != 2 or variants[0] == variants[1]:
        raise ConfigError("name two variants of the run: --variant BASELINE --variant VARIANT")
    return [(variants[0], variants[1])]


def _write_script(source: Source, pairs: Sequence[Pair], view_set: ViewSet) -> None:
    """Write the script, with paths relative to the run's directory, unless the directory is read-only."""
    sql = load_sql([source], pairs, view_set, lambda path: str(path.relative_to(source.directory)))
    head = f"-- {SCRIPT.rpartition('/')[2]}: run in the directory of the run.\n"
    head += f"-- sha256 of the statements: {hashlib.sha256(sql.encode()).hexdigest()}\n"
    path = source.directory / SCRIPT
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, (head + sql).encode())
    except (OSError, StorageError):
        return
