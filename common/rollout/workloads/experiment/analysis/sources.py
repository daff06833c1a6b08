"""Runs whose facts are read: one run, two to compare, or all runs of a project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.manifest import FACTS, facts_of, read_manifest
from rollout.workloads.experiment.contracts import RunManifest

Pair = tuple[str, str]
"""(baseline, variant)"""
SIBLINGS_MAX = 100
"""Maximum number of earlier runs of an experiment in its trend."""


@dataclass(frozen=True, slots=True)
class Source:
    """A run. Paths of its files are relative to `directory`. If two runs are compared, `label` and a slash precede each
    of its variants. `selected` tells a run asked about from one that appears in the trend only."""

    directory: Path
    facts: Path
    manifest: RunManifest
    label: str = ""
    selected: bool = True

    def named(self, variant: str) -> str:
        return f"{self.label}/{variant}" if self.label else variant

    @property
    def variants(self) -> list[str]:
        return [self.named(one.variant_id) for one in self.manifest.variants]


def read_source(directory: Path) -> Source:
    """Read a run. Raises ConfigError if there are no facts, InputError if the manifest is damaged."""
    facts = facts_of(directory)
    if facts is None:
        raise ConfigError(f"{directory}: it has no facts/run_manifest.json: name the directory of an experiment's run")
    return Source(facts.parent if facts.name == FACTS else facts, facts, read_manifest(facts))


def siblings(source: Source) -> list[Source]:
    """Return the newest SIBLINGS_MAX other runs of the same experiment next to `source`."""
    mine = source.manifest
    found = [one for one in project(source.directory.resolve().parent) if one.manifest.run_id != mine.run_id]
    same = [one for one in found if one.manifest.experiment_id == mine.experiment_id]
    return [replace(one, selected=False) for one in same[-SIBLINGS_MAX:]]


def project(runs_dir: Path) -> list[Source]:
    """Return all runs in `runs_dir` that have facts, the oldest first, without copies and those with a damaged
    manifest."""
    found: dict[str, Source] = {}
    try:
        directories = sorted(path for path in runs_dir.iterdir() if path.is_dir())
    except OSError:
        return []
    for path in directories:
        try:
            one = read_source(path)
        except (ConfigError, InputError):
            continue
        found.setdefault(one.manifest.run_id, one)
    return sorted(found.values(), key=lambda one: (one.manifest.created_at, one.manifest.run_id))


def pairs_of(source: Source) -> list[Pair]:
    """Pair the baseline of a run with each of its other variants; empty if its design compares nothing."""
    manifest = source.manifest
    if manifest.design.comparison == "none":
        return []
    return [(manifest.baseline, one.variant_id) for one in manifest.variants if one.variant_id != manifest.baseline]


def two_sources(a: Source, b: Source, variants: Sequence[str] = ()) -> tuple[list[Source], list[Pair]]:
    """Return two runs with distinct labels, and which of their variants to compare: each variant that both have, or the
    only one of each run. `variants` names one for both, or that of A and that of B.

    Raises ConfigError if there is no such variant, or none to compare.
    """
    same_name = a.manifest.name == b.manifest.name
    labels = ("A", "B") if same_name else (a.manifest.name, b.manifest.name)
    first, second = replace(a, label=labels[0]), replace(b, label=labels[1])
    has_a, has_b = ([one.variant_id for one in each.manifest.variants] for each in (a, b))
    if len(variants) > 2:
        raise ConfigError(f"--variant: {len(variants)} are named; two can be compared at a time")
    if variants:
        chosen = [(variants[0], variants[-1])]
        for label, name, has in ((labels[0], variants[0], has_a), (labels[1], variants[-1], has_b)):
            if name not in has:
                raise ConfigError(f'{label} has no variant "{name}"; it has {", ".join(has)}')
    elif len(has_a) == len(has_b) == 1:
        chosen = [(has_a[0], has_b[0])]
    else:
        chosen = [(name, name) for name in has_a if name in has_b]
    if not chosen:
        raise ConfigError(
            f"no variant is in both runs: {labels[0]} has {', '.join(has_a)}, {labels[1]} has {', '.join(has_b)}; name "
            "the two with --variant X --variant Y"
        )
    return [first, second], [(first.named(one), second.named(other)) for one, other in chosen]
