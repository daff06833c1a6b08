"""The tests of a project, group by group, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from rollout.model.errors import ConfigError, InputError
from rollout.model.problems import faults_of, problems
from rollout.workloads.test.cases import Case, CaseResult
from rollout.workloads.test.config import TestConfig
from rollout.workloads.test.frameworks import FRAMEWORKS
from rollout.workloads.test.frameworks.port import Discovered, Group
from rollout.workloads.test.project import Project
from rollout.workloads.test.run_config import GroupConfig


@dataclass(frozen=True, slots=True)
class Found:
    groups: dict[str, GroupConfig]
    cases: tuple[Case, ...]
    results: tuple[CaseResult, ...]
    """Of what came to one when it was collected."""


def discover(project: Project, settings: TestConfig, selected: Sequence[str], tell: Callable[[str], None]) -> Found:
    """ConfigError, InputError: with all that keeps groups from being collected; or there are no tests."""
    framework = FRAMEWORKS.get(settings.framework.kind)
    if framework is None:
        raise ConfigError(f'framework.type: "{settings.framework.type}" is not supported yet')
    named = tuple(_from_root(one, project.root) for one in selected)
    groups = [
        Group(name, group, settings.framework, named, settings.provider.env) for name, group in settings.groups.items()
    ]
    config = framework.group_config(project, groups[0])
    configs = {groups[0].name: config}
    for group in groups[1:]:
        configs[group.name] = framework.group_config(project, group)

    def one(group: Group) -> Discovered | str:
        try:
            return framework.discover(project, group, configs[group.name], tell)
        except (ConfigError, InputError) as error:
            return error.message

    most = settings.offload.max_parallel_collection or cpu_count() or 1
    with ThreadPoolExecutor(most, "collect") as pool:
        found = list(pool.map(one, groups))
    faults = [fault for text in found if isinstance(text, str) for fault in faults_of(text)]
    if faults:
        raise InputError(problems(dict.fromkeys(faults)))
    parts = [part for part in found if isinstance(part, Discovered)]
    cases = tuple(case for part in parts for case in part.cases)
    results = tuple(result for part in parts for result in part.results)
    if not cases and not results:
        what = f" that {' or '.join(selected)} names" if selected else ""
        raise InputError(f"there are no tests{what} in {project.root} (groups {', '.join(settings.groups)})")
    return Found(configs, cases, results)


def _from_root(selected: str, root: Path) -> str:
    """A path, or the path of an id, that is relative to the current directory, as the project sees it."""
    path, separator, rest = selected.partition("::")
    absolute = Path(path).absolute()
    if not path or not absolute.exists() or Path.cwd() == root:
        return selected
    inside = absolute.is_relative_to(root)
    return f"{absolute.relative_to(root) if inside else absolute}{separator}{rest}"
