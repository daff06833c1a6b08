"""Discovers the tests of a project, group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.model.problems import problems
from rollout.workloads.test.cases import Case, CaseResult
from rollout.workloads.test.config import TestConfig
from rollout.workloads.test.frameworks import FRAMEWORKS
from rollout.workloads.test.frameworks.port import Discovered, Framework, Group
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig


@dataclass(frozen=True, slots=True)
class Found:
    groups: dict[str, GroupConfig]
    cases: tuple[Case, ...]
    results: tuple[CaseResult, ...]
    """Results of tests that were decided during collection."""
    notes: tuple[str, ...] = ()


def framework_of(settings: TestConfig) -> Framework:
    """Return the framework. Raises ConfigError if it is not supported."""
    framework = FRAMEWORKS.get(settings.framework.kind)
    if framework is None:
        known = ", ".join(FRAMEWORKS)
        raise ConfigError(f'framework.type: "{settings.framework.type}" is not supported yet; these are: {known}')
    return framework


def discover(
    project: Project,
    settings: TestConfig,
    selected: Sequence[str],
    tell: Callable[[str], None],
    only: frozenset[str] = frozenset(),
) -> Found:
    """Discover tests. `selected` are paths or ids, all of which must exist. `only` are ids and files; other selected
    tests are left out, none if it is empty. Raises ConfigError or InputError with everything that prevents collection,
    or if there are no tests."""
    framework = framework_of(settings)
    named = tuple(_from_root(one, project.root) for one in selected)
    groups = [
        Group(name, group, settings.framework, named, settings.provider.env) for name, group in settings.groups.items()
    ]
    configs = {group.name: framework.group_config(project, group) for group in groups}

    def one(group: Group) -> Discovered | str:
        try:
            return framework.discover(project, group, configs[group.name], tell)
        except (ConfigError, InputError) as error:
            return error.message

    most = settings.offload.max_parallel_collection or cpu_count() or 1
    with ThreadPoolExecutor(most, "collect") as pool:
        found = list(pool.map(one, groups))
    faults = [text for text in found if isinstance(text, str)]
    if faults:
        raise InputError(problems(faults))
    parts = [part for part in found if isinstance(part, Discovered)]
    cases = tuple(case for part in parts for case in part.cases if not only or {case.id, case.file} & only)
    collected: dict[str, CaseResult] = {}  # what no group can collect is told once
    for result in (result for part in parts for result in part.results if not only or result.id in only):
        collected.setdefault(result.id, result)
    if not cases and not collected:
        what = f" that {' or '.join(selected[:5])} names" if selected else ""
        named = f" in the groups {', '.join(settings.groups)}" if len(settings.groups) > 1 else ""
        raise InputError(f"there are no tests{what} in {project.root}{named}: {framework.how_to_find}")
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return Found(configs, cases, tuple(collected.values()), tuple(notes))


def _from_root(selected: str, root: Path) -> str:
    """Convert a path, or the path of an id, from relative to the current directory to relative to the project."""
    path, separator, rest = selected.partition("::")
    absolute = Path(path).absolute()
    if not path or not absolute.exists() or Path.cwd() == root:
        return selected
    inside = absolute.is_relative_to(root)
    return f"{absolute.relative_to(root) if inside else absolute}{separator}{rest}"
