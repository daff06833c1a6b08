"""The trials of a job: their order, and ids that last when a job grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from job_files import make_task
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.datasets import Dataset, load_datasets
from rollout.workloads.job.plan import Trial, change, plan

AGENTS = [{"name": "a", "execute": "true"}, {"name": "b", "execute": "false"}]


class World:
    """A directory of tasks, and the trials that jobs of it have."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "d"
        for name in ("t1", "t2"):
            make_task(self.path / name)

    def trials(self, agents: Sequence[dict[str, Any]] = AGENTS, **keys: Any) -> list[Trial]:
        values = {"agents": agents, "datasets": [{"path": str(self.path)}], "n_attempts": 2, **keys}
        config = JobConfig.model_validate(values)
        datasets = self.datasets(config)
        trials = list(plan(config, datasets))
        assert len(trials) == len(config.agents) * sum(len(one.tasks) for one in datasets) * config.n_attempts
        return trials

    def datasets(self, config: JobConfig) -> tuple[Dataset, ...]:
        return load_datasets(config).datasets

    def ids(self, agents: Sequence[dict[str, Any]] = AGENTS, **keys: Any) -> dict[str, bytes]:
        """By the directory of the trial."""
        trials = self.trials(agents, **keys)
        found = {str(trial.directory): trial.id for trial in trials}
        assert len(set(found.values())) == len(trials)
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def differing(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Directories that are in both, with another id."""
    return [name for name in before if name in after and before[name] != after[name]]


def test_every_agent_has_its_turn_at_a_task_before_the_next_task_and_the_next_attempt(world: World) -> None:
    assert [str(trial.directory) for trial in world.trials()] == [
        f"d/{task}/{agent}/{attempt}" for attempt in (1, 2) for task in ("t1", "t2") for agent in "ab"
    ]


def test_the_same_job_has_the_same_ids_from_another_place(world: World, tmp_path: Path) -> None:
    before = world.ids()
    world.path.rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    (tmp_path / "moved").rename(tmp_path / "other" / "d")
    world.path = tmp_path / "other" / "d"
    assert world.ids() == before


@pytest.mark.parametrize(
    ("agents", "keys"),
    [
        (AGENTS, {"n_attempts": 5}),
        ([{"name": "new", "execute": "true"}, *AGENTS], {}),
        ([{**AGENTS[0], "n_concurrent": 1, "description": "first"}, AGENTS[1]], {}),
        (AGENTS, {"n_concurrent_trials": 9, "retry": {"max_attempts": 9}, "name": "x", "log_level": "debug"}),
        (AGENTS, {"budget": {"max_tokens": 5}, "metrics": [{"type": "max"}], "jobs_dir": "elsewhere"}),
        (AGENTS, {"environment": {"preserve_env": "always", "force_build": True}}),
        (AGENTS, {"override_error_policy": {"cancelled": {"should_retry": True}}}),
        (AGENTS, {"timeout_multiplier": 1.0, "verifier": {"disable": False}}),
    ],
)
def test_what_stands_beside_a_trial_leaves_its_id(
    world: World, agents: list[dict[str, Any]], keys: dict[str, Any]
) -> None:
    before, after = world.ids(), world.ids(agents, **keys)
    assert differing(before, after) == []
    assert set(before) <= set(after)


def test_a_new_task_leaves_the_ids_of_the_others(world: World) -> None:
    before = world.ids()
    make_task(world.path / "t0")
    after = world.ids()
    assert differing(before, after) == []
    assert len(after) == len(before) + 4


@pytest.mark.parametrize(
    "change",
    [
        {"execute": "true "},
        {"install": "apt-get install x"},
        {"env": {"A": "b"}},
        {"model_name": "m"},
        {"max_timeout_sec": 5},
    ],
)
def test_a_changed_agent_changes_its_ids_alone(world: World, change: dict[str, Any]) -> None:
    found = differing(world.ids(), world.ids([{**AGENTS[0], **change}, AGENTS[1]]))
    assert found == [f"d/{task}/a/{attempt}" for attempt in (1, 2) for task in ("t1", "t2")]


@pytest.mark.parametrize("file", ["task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh"])
def test_a_changed_task_changes_its_ids_alone(world: World, file: str) -> None:
    before = world.ids()
    with (world.path / "t2" / file).open("a") as out:
        out.write("# more\n")
    assert differing(before, world.ids()) == [f"d/t2/{agent}/{attempt}" for attempt in (1, 2) for agent in "ab"]


@pytest.mark.parametrize(
    "keys",
    [
        {"timeout_multiplier": 2},
        {"instruction_path": "/do.md"},
        {"environment": {"type": "process"}},
        {"environment": {"override_memory": "4G"}},
        {"verifier": {"disable": True}},
        {"artifacts": ["/out"]},
    ],
)
def test_a_setting_that_reaches_into_trials_changes_all(world: World, keys: dict[str, Any]) -> None:
    before = world.ids()
    assert differing(before, world.ids(AGENTS, **keys)) == list(before)


def test_another_dialect_is_another_trial(world: World) -> None:
    before = world.ids()
    datasets = [{"path": str(world.path), "dialect": "harbor"}]
    assert differing(before, world.ids(AGENTS, datasets=datasets)) == list(before)


def test_agents_that_differ_in_their_label_alone_are_two(world: World) -> None:
    agents = [{**AGENTS[0], "label": label} for label in ("one", "two")]
    assert len(world.ids(agents)) == 8


def test_a_label_that_is_the_name_says_nothing_new(world: World) -> None:
    assert world.ids([{**AGENTS[0], "label": "a"}, AGENTS[1]]) == world.ids()


def test_one_task_in_two_datasets_is_two(world: World) -> None:
    datasets = [{"path": str(world.path)}, {"path": str(world.path), "name": "again"}]
    found = world.ids(datasets=datasets)
    assert len(found) == 16
    assert differing(world.ids(), found) == []


def test_ids_are_what_they_always_were(world: World) -> None:
    """Runs that began with an earlier version go on with a later one: change this with the schema byte alone."""
    agents = [{**AGENTS[0], "env": {"A": "b"}}]
    first = world.trials(agents, timeout_multiplier=2, environment={"type": "process"})[0]
    assert first.id.hex() == "be169eaddc5ae313e464c171160cf036caf0b88eb3cbad05294327535c900189"


def test_a_template_is_hashed_and_never_what_it_stands_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [{**AGENTS[0], "env": {"KEY": "${KEY}"}}]
    monkeypatch.setenv("KEY", "one")
    before = world.ids(agents)
    monkeypatch.setenv("KEY", "two")
    assert world.ids(agents) == before


def test_what_changed_since_a_job_was_planned(world: World) -> None:
    before = [trial.id for trial in world.trials(AGENTS[:1])]
    (world.path / "t1" / "instruction.md").write_text("another\n")
    now = world.trials(AGENTS)
    found = change(before, now)
    assert [str(trial.directory) for trial in found.kept] == ["d/t2/a/1", "d/t2/a/2"]
    assert {str(trial.directory) for trial in found.added} == {
        "d/t1/a/1",
        "d/t1/a/2",
        *(f"d/{task}/b/{attempt}" for task in ("t1", "t2") for attempt in (1, 2)),
    }
    assert list(found.gone) == [before[0], before[2]]
