"""job.yaml: every key and default, Harbor's names for them, and every mistake with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_files import make_task
from located import places
from rollout.config.load import Located, load_settings
from rollout.model.errors import ConfigError
from rollout.workloads.job.config import AgentSection, JobConfig, RetrySection, environments
from rollout.workloads.job.errors import PolicyOverride
from rollout.workloads.job.load_task import load_task
from rollout.workloads.job.named import job_values
from rollout.workloads.job.retries import delay_ms, is_retried
from rollout.workloads.job.templates import unset
from rollout.workloads.job.timeouts import Timeouts, timeouts

WHOLE = {"agents": [{"name": "oracle"}], "datasets": [{"path": "tasks"}]}


def load(tmp_path: Path, text: str, name: str = "job.yaml") -> JobConfig:
    path = tmp_path / name
    path.write_text(text)
    return load_settings(JobConfig, path, environ={})


def changed(tmp_path: Path, **keys: Any) -> JobConfig:
    return load(tmp_path, json.dumps({**WHOLE, **keys}), "job.json")


def fault(tmp_path: Path, text: str, name: str = "job.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, name)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_the_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "agents:\n- name: oracle\ndatasets:\n- path: tasks\n")
    assert (config.jobs_dir, config.n_attempts, config.n_concurrent_trials) == ("jobs", 1, 4)
    assert (config.timeout_multiplier, config.instruction_path) == (1.0, "/tmp/instruction.md")
    retry = config.retry
    assert (retry.max_attempts, retry.initial_delay_ms, retry.max_delay_ms, retry.multiplier) == (3, 1000, 30000, 2.0)
    environment = config.environment
    assert (environment.type, environment.force_build, environment.preserve_env) == ("docker", False, "never")
    assert (config.verifier.disable, config.metrics, config.log_level) == (False, [], "info")
    assert config.name == "job"  # that of the file


def test_every_key_of_the_format(tmp_path: Path) -> None:
    text = """name: nightly
jobs_dir: out
n_attempts: 3
n_concurrent_trials: 8
timeout_multiplier: 2
retry:
  max_attempts: 5
  initial_delay_ms: 10
  max_delay_ms: 100
  multiplier: 3
log_level: debug
instruction_path: /work/do.md
environment:
  type: k8s
  force_build: yes
  preserve_env: on_failure
  provider_config: {namespace: evals, replicas: 2}
  override_cpus: 2
  override_memory: 4G
  override_storage: "20G"
verifier:
  override_timeout_sec: 60
  max_timeout_sec: 90
  disable: no
metrics:
  - type: mean
  - type: max
agents:
  - name: mine
    description: writes hello
    install: apt-get install -y jq
    execute: |
      echo hello > hello.txt
    env: {LEVEL: 3, DEBUG: true, KEY: "${KEY}"}
datasets:
  - path: tasks
  - registry: {url: https://example.org/registry.json}
    name: tb
    version: 2.0
"""
    config = load(tmp_path, text)
    assert (config.name, config.jobs_dir, config.n_attempts, config.n_concurrent_trials) == ("nightly", "out", 3, 8)
    assert config.retry.model_dump(exclude={"include", "exclude"}) == {
        "max_attempts": 5,
        "initial_delay_ms": 10,
        "max_delay_ms": 100,
        "multiplier": 3.0,
    }
    environment = config.environment
    assert (environment.type, environment.force_build, environment.preserve_env) == ("kubernetes", True, "on_failure")
    assert environment.provider_config == {"namespace": "evals", "replicas": 2}
    assert (environment.override_cpus, environment.memory_mb, environment.storage_mb) == (2.0, 4096, 20480)
    assert (config.verifier.override_timeout_sec, config.verifier.max_timeout_sec) == (60, 90)
    (agent,) = config.agents
    assert agent.env == {"LEVEL": "3", "DEBUG": "true", "KEY": "${KEY}"}
    assert (agent.install, agent.execute) == ("apt-get install -y jq", "echo hello > hello.txt\n")
    assert config.datasets[1].version == "2.0"
    assert config.datasets[1].registry is not None
    assert [metric.type for metric in config.metrics] == ["mean", "max"]


def test_a_job_file_of_harbor(tmp_path: Path) -> None:
    text = """job_name: tb
jobs_dir: jobs
n_attempts: 2
n_concurrent_trials: 4
agent_timeout_multiplier: 2.0
retry: {max_retries: 2, min_wait_sec: 0.5, max_wait_sec: 60, wait_multiplier: 1.5,
        include_exceptions: [AgentTimeoutError], exclude_exceptions: null}
environment: {type: docker, delete: false, kwargs: {a: 1}, override_memory_mb: 512, memory_enforcement_policy: limit}
agents:
  - {import_path: "agents.mine:Solver", model_name: org/m, n_concurrent: 2, concurrency_group: g, kwargs: {t: 1}}
  - {name: oracle, override_timeout_sec: 5, max_timeout_sec: 9}
datasets:
  - {name: terminal-bench, version: "2.0", registry_url: "https://example.org/r.json", task_names: [fix-*], n_tasks: 5}
  - {path: d, exclude_task_names: ["*slow*"]}
  - {repo: "https://example.org/x.git", git_commit_id: main, path: tasks}
tasks:
  - {path: one}
artifacts: [/app/out]
override_error_policy:
  AgentTimeoutError: {should_retry: true}
"""
    config = load(tmp_path, text)
    assert config.name == "tb"
    assert (config.retry.max_attempts, config.retry.initial_delay_ms, config.retry.max_delay_ms) == (3, 500, 60000)
    assert (config.retry.include, config.retry.exclude) == (["agent_execution_timeout"], [])
    assert (config.environment.preserve_env, config.environment.provider_config) == ("always", {"a": 1})
    assert config.environment.memory_mb == 512
    assert [(agent.id, agent.lane) for agent in config.agents] == [("Solver", "group:g"), ("oracle", "oracle")]
    first = config.datasets[0]
    assert first.registry is not None
    assert (first.registry.url, first.task_names, first.n_tasks) == ("https://example.org/r.json", ["fix-*"], 5)
    assert config.datasets[2].git_url == "https://example.org/x.git"
    assert config.override_error_policy["agent_execution_timeout"].should_retry is True


def test_a_key_with_nothing_after_it_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    text = "agents:\n- name: mine\n  execute: x\n  label:\n  kwargs: {a: }\ndatasets:\n- path: d\nretry:\nmetrics:\nname:\n"
    found = load(tmp_path, text)
    assert (found.name, found.metrics, found.retry.max_attempts) == ("job", [], 3)
    assert found.agents[0].kwargs == {"a": None}
    assert "job.yaml:3: agents.0.env.A: " in fault(tmp_path, "agents:\n- env:\n    A:\ndatasets:\n- path: d\n")


def test_keys_of_harbor_that_change_no_result_are_read(tmp_path: Path) -> None:
    datasets = [{"path": "tasks", "overwrite": True, "download_dir": "x"}]
    found = changed(tmp_path, quiet=True, debug=True, environment={"stream": True}, datasets=datasets)
    assert found == changed(tmp_path, log_level="debug")


def test_keys_of_harbors_orchestrator_stand_at_the_top(tmp_path: Path) -> None:
    orchestrator = {"type": "local", "n_concurrent_trials": 2, "retry": {"max_retries": 4}, "quiet": True}
    found = changed(tmp_path, orchestrator=orchestrator)
    assert found == changed(tmp_path, n_concurrent_trials=2, retry={"max_attempts": 5})
    with pytest.raises(ConfigError) as caught:
        changed(tmp_path, orchestrator={"type": "ray", "n_concurrent_trials": 0})
    assert "orchestrator.type: " in caught.value.message
    assert "n_concurrent_trials: " in caught.value.message


def test_keys_of_harbor_that_would_change_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="extra_instructions: unknown key"):
        changed(tmp_path, extra_instructions=["be quick"])


def test_what_a_run_stores_is_read_again(tmp_path: Path) -> None:
    config = changed(tmp_path, environment={"override_memory": "4G"}, retry={"max_retries": 1}, artifacts=["/a"])
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "a/b"}, 'name: "a/b" cannot be a directory'),
        ({"job_name": "a", "name": "b"}, "job_name: another name of name, and both are set: keep name"),
        ({"jobs_dir": ""}, "jobs_dir: must not be empty"),
        ({"n_attempts": 0}, "n_attempts: must be at least 1, not 0"),
        ({"n_attempts": 1.5}, "n_attempts: must be an integer, not 1.5"),
        ({"n_concurrent_trials": 0}, "n_concurrent_trials: must be at least 1"),
        ({"timeout_multiplier": 0}, "timeout_multiplier: must be more than 0"),
        ({"agent_timeout_multiplier": "x"}, "agent_timeout_multiplier: must be a number"),
        ({"verifier_timeout_multiplier": -1}, "verifier_timeout_multiplier: must be more than 0"),
        ({"agent_setup_timeout_multiplier": -1}, "agent_setup_timeout_multiplier: must be more than 0"),
        ({"environment_build_timeout_multiplier": -1}, "environment_build_timeout_multiplier: must be more than 0"),
        ({"log_level": "trace"}, 'log_level: must be "debug", "info"'),
        ({"instruction_path": "x"}, "instruction_path: must match ^/"),
        ({"schema_version": 2}, "schema_version: must be 1, not 2"),
        ({"retry": 3}, "retry: must be keys and values, not 3"),
        ({"retry": {"max_attempts": 0}}, "retry.max_attempts: must be at least 1"),
        ({"retry": {"max_retries": 2, "max_attempts": 2}}, "retry.max_retries: another name of max_attempts"),
        ({"retry": {"max_retries": "x"}}, "retry.max_attempts: must be an integer"),
        ({"retry": {"multiplier": 0.5}}, "retry.multiplier: must be at least 1"),
        ({"retry": {"initial_delay_ms": -1}}, "retry.initial_delay_ms: must be at least 0"),
        ({"retry": {"max_delay_ms": -1}}, "retry.max_delay_ms: must be at least 0"),
        ({"retry": {"include": ["oops"]}}, 'retry.include: "oops" is no type of error; see the table'),
        ({"retry": {"include": ["verifier_timout"]}}, 'is no type of error; did you mean "verifier_timeout"?'),
        ({"retry": {"exclude": "x"}}, "retry.exclude: must be a list"),
        ({"environment": {"preserve_env": "sometimes"}}, "environment.preserve_env: must be"),
        ({"environment": {"delete": "maybe"}}, "environment.preserve_env: must be"),
        ({"environment": {"force_build": 1}}, "environment.force_build: must be true or false"),
        ({"environment": {"override_cpus": "two"}}, "environment.override_cpus: must be like"),
        ({"environment": {"override_memory": "4"}}, "environment.override_memory: must be at least 1 MiB"),
        ({"environment": {"override_storage": "big"}}, "environment.override_storage: must be like"),
        (
            {"environment": {"override_memory": "4G", "override_memory_mb": 5}},
            "environment: override_memory and override_memory_mb disagree",
        ),
        ({"environment": {"override_gpus": -1}}, "environment.override_gpus: must be at least 0"),
        ({"environment": {"cpu_enforcement_policy": "hard"}}, "environment.cpu_enforcement_policy: must be"),
        ({"environment": {"env": {"A": "${"}}}, 'environment.env: A: "${" must be like'),
        ({"environment": {"extra_allowed_hosts": ["a b"]}}, "environment.extra_allowed_hosts: "),
        ({"environment": {"provider_config": []}}, "environment.provider_config: must be a table"),
        ({"environment": {"tpye": "docker"}}, 'environment.tpye: unknown key; did you mean "type"?'),
        (
            {"environment": {"type": "dokcer"}},
            'environment.type: there is no provider "dokcer"; did you mean "docker"?',
        ),
        ({"verifier": {"override_timeout_sec": -1}}, "verifier.override_timeout_sec: must be at least 0"),
        ({"verifier": {"disable": "never"}}, "verifier.disable: must be true or false"),
        ({"metrics": [{"type": "median"}]}, 'metrics.0.type: must be "sum", "min", "max"'),
        ({"metrics": [{"type": "custom"}]}, 'metrics.0: type: custom and function: "module:function" go together'),
        ({"metrics": [{"type": "uv-script"}]}, "metrics.0: type: uv-script needs kwargs"),
        ({"agents": []}, "agents: must not be empty"),
        (
            {"agents": [{"name": "orcale"}]},
            '"orcale" is no agent: give it execute, which is bash, or import_path; or did you mean "oracle"',
        ),
        ({"agents": [{"name": "oracle", "execute": "x"}]}, '"oracle" is built in and takes no install'),
        ({"agents": [{"name": "claude-cod"}]}, 'agents.0: "claude-cod" is no agent: give it execute, which is bash'),
        ({"agents": [{"name": "claude-cod"}]}, 'or did you mean "claude-code"?'),
        ({"agents": [{"name": "codex", "install": "x"}]}, "install goes with execute"),
        ({"agents": [{"name": "aider"}]}, "agents.0: aider needs a model_name, such as openai/gpt-5"),
        (
            {"agents": [{"name": "codex", "kwargs": {"verson": "1"}}]},
            'agents.0.kwargs.verson: unknown key; did you mean "version"?',
        ),
        (
            {"agents": [{"name": "codex", "kwargs": {"version": "1 2"}}]},
            'agents.0.kwargs.version: "1 2" is no version, such as 1.2.3',
        ),
        ({"agents": [{"name": "codex", "kwargs": {"x": 1}}]}, "unknown key; codex takes version, bundle, cache"),
        ({"agents": [{"name": "nop", "kwargs": {"x": 1}}]}, "agents.0.kwargs.x: nop takes no kwargs: remove it"),
        (
            {"agents": [{"name": "codex", "kwargs": {"price": {"input": 1, "output": 1, "cashed": 1}}}]},
            'agents.0.kwargs.price.cashed: unknown key; did you mean "cached"?',
        ),
        (
            {"agents": [{"name": "shell-loop", "base_url": "http://x", "model_name": "m", "kwargs": {"max_turns": 0}}]},
            "agents.0.kwargs.max_turns: must be at least 1, not 0",
        ),
        (
            {"agents": [{"name": "shell-loop", "base_url": "http://x"}]},
            "shell-loop needs a model_name beside its base_url",
        ),
        ({"agents": [{"name": "shell-loop"}]}, "shell-loop needs a base_url and a model_name, or the key engine"),
        (
            {"agents": [{"name": "shell-loop", "model_name": "gpt"}], "engine": {"model": {"uri": "m"}}},
            "has a model_name and no base_url: add base_url, or write model_name: engine",
        ),
        (
            {"agents": [{"name": "a", "execute": "x", "model_name": "engine"}]},
            "model of the key engine, which is not here",
        ),
        (
            {"agents": [{"name": "codex", "model_name": "engine"}], "engine": {"model": {"uri": "m"}}},
            "codex asks models over HTTP, not the engines of this cluster: only shell-loop does",
        ),
        ({"engine": {"model": {}}}, "engine.model.uri: is missing"),
        ({"engine": {"model": {"uri": "m"}, "sampling": {"n": 2}}}, "sampling.n must be 1, not 2"),
        (
            {"engine": {"model": {"uri": "m"}, "backend": {"knd": "mock"}}},
            'engine.backend.knd: unknown key; did you mean "kind"?',
        ),
        ({"agents": [{"name": "a", "execute": "x", "import_path": "m:C"}]}, "two ways to run an agent"),
        ({"agents": [{"name": "a", "import_path": "m.C"}]}, "agents.0.import_path: must match"),
        ({"agents": [{"name": "a:b", "execute": "x"}]}, 'agents.0.name: "a:b" cannot be a directory'),
        ({"agents": [{"name": "a", "execute": "x", "model_name": "o/m"}] * 2}, "such as label: a-m"),
        ({"agents": [{"concurrency_group": "g"}]}, "agents.0: concurrency_group needs n_concurrent"),
        ({"agents": [{"n_concurrent": 5}]}, "agents.0.n_concurrent: 5 is more than n_concurrent_trials, which is 4"),
        (
            {"agents": [{"n_concurrent": n, "concurrency_group": "g", "label": f"l{n}"} for n in (1, 2)]},
            'agents.1.n_concurrent: 2, where another agent of the group "g" has 1',
        ),
        ({"agents": [{"override_setup_timeout_sec": -1}]}, "agents.0.override_setup_timeout_sec: must be at least 0"),
        ({"datasets": []}, "datasets: there are none, and no tasks"),
        ({"datasets": [{"name": "tb"}]}, 'datasets.0: name needs a registry in which "tb" is looked up'),
        ({"datasets": [{}]}, "datasets.0: name a path, a registry with a name, or a git_url"),
        ({"datasets": [{"path": "a", "registry": {"path": "b"}}]}, "registry does not go with path"),
        ({"datasets": [{"registry": {"path": "b"}}]}, "datasets.0: registry needs the name of a dataset"),
        ({"datasets": [{"registry": {"path": "b", "url": "http://x"}, "name": "n"}]}, "name either a path or a url"),
        ({"datasets": [{"registry": {"url": "ftp://x"}, "name": "n"}]}, "datasets.0.registry.url: must match"),
        ({"datasets": [{"path": "a", "git_commit_id": "main"}]}, "datasets.0: git_commit_id needs git_url"),
        ({"datasets": [{"git_url": "--x"}]}, 'datasets.0.git_url: "--x" is no address of a repository'),
        ({"datasets": [{"path": "a", "n_tasks": 0}]}, "datasets.0.n_tasks: must be at least 1"),
        ({"datasets": [{"path": "a", "dialect": "go"}]}, 'datasets.0.dialect: must be "rollout" or "harbor"'),
        ({"tasks": [{}]}, "tasks.0.path: is missing"),
        ({"artifacts": ["/a/../b"]}, 'artifacts.0: "/a/../b" must not hold ".."'),
        ({"override_error_policy": {"oops": {}}}, 'override_error_policy: "oops" is no type of error'),
        (
            {"override_error_policy": {"cancelled": {"retry": True}}},
            "cancelled.retry: unknown key; valid keys are should_retry",
        ),
        ({"budget": {"max_tokens": 0}}, "budget.max_tokens: must be at least 1"),
        ({"budget": {"max_cost_usd": 0}}, "budget.max_cost_usd: must be more than 0"),
        ({"budget": {"max_wall_time_sec": "1h"}}, "budget.max_wall_time_sec: must be a number"),
        ({"infrastructure": {"min_success_rate": 2}}, "infrastructure.min_success_rate: must be at most 1"),
        ({"infrastructure": {"after_trials": 0}}, "infrastructure.after_trials: must be at least 1"),
        ({"n_atempts": 2}, 'n_atempts: unknown key; did you mean "n_attempts"?'),
    ],
)
def test_a_wrong_key_is_told(tmp_path: Path, keys: dict[str, Any], expected: str) -> None:
    found = fault(tmp_path, json.dumps({**WHOLE, **keys}), "job.json")
    assert expected in found
    assert "problems" not in found


def test_all_faults_are_told_with_their_lines(tmp_path: Path) -> None:
    text = """job_name: a
name: b
n_attempts: 0
retry:
  max_retries: x
agents:
  - name: a
    execute: x
    n_concurrent: 9
  - name: A
    executes: y
datasets:
  - path: x
    path: y
"""
    twice = fault(tmp_path, text)
    assert places(twice) == ["job.yaml:14"] and '"path"' in twice and "line 13" in twice
    assert places(fault(tmp_path, text.replace("    path: y\n", ""))) == [
        "job.yaml:3: n_attempts",
        "job.yaml:5: retry.max_attempts",
        "job.yaml:11: agents.1.executes",
        "job.yaml:1: job_name",
        "job.yaml:9: agents.0.n_concurrent",
        "job.yaml:10: agents.1",
    ]


@pytest.mark.parametrize(
    ("job", "agent", "expected"),
    [
        ({}, {}, Timeouts(600, 300, 600, 600)),
        ({"timeout_multiplier": 2}, {}, Timeouts(1200, 600, 1200, 1200)),
        ({"timeout_multiplier": 2, "agent_timeout_multiplier": 0.5}, {}, Timeouts(1200, 600, 300, 1200)),
        ({}, {"override_timeout_sec": 50, "max_timeout_sec": 40}, Timeouts(600, 300, 40, 600)),
        ({}, {"override_timeout_sec": 0, "max_timeout_sec": 0}, Timeouts(600, 300, 600, 600)),
        ({}, {"override_setup_timeout_sec": 9}, Timeouts(600, 9, 600, 600)),
        ({"verifier": {"override_timeout_sec": 5, "max_timeout_sec": 9}}, {}, Timeouts(600, 300, 600, 5)),
        ({"verifier": {"max_timeout_sec": 9}, "verifier_timeout_multiplier": 3}, {}, Timeouts(600, 300, 600, 27)),
        (
            {"environment_build_timeout_multiplier": 0.1, "agent_setup_timeout_multiplier": 0.1},
            {},
            Timeouts(60, 30, 600, 600),
        ),
    ],
)
def test_timeouts(tmp_path: Path, job: dict[str, Any], agent: dict[str, Any], expected: Timeouts) -> None:
    task = load_task(make_task(tmp_path / "t")).task
    found = timeouts(
        JobConfig.model_validate({**WHOLE, **job}), AgentSection.model_validate(agent), task, task.steps[0]
    )
    assert found == expected


def test_an_agent_without_a_limit_has_at_most_the_jobs(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "t", "")).task
    config = JobConfig.model_validate({**WHOLE, "timeout_multiplier": 2})
    assert timeouts(config, AgentSection(), task, task.steps[0]).agent_s is None
    assert timeouts(config, AgentSection(max_timeout_sec=10), task, task.steps[0]).agent_s == 20


def test_variables_of_the_job_that_are_missing_are_told_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("""agents:
  - name: a
    execute: x
    env:
      KEY: ${KEY}
      SET: ${HOME_OF_TESTS:-there}
verifier: {env: {V: "${V}"}}
datasets: [{path: d}]
""")
    config = load_settings(JobConfig, path, environ={})
    found = list(unset(environments(config), {}, Located.read(path).where))
    assert [one.replace(f"{tmp_path}/", "").partition(", which")[0] for one in found] == [
        "job.yaml:7: verifier.env: V needs V",
        "job.yaml:5: agents.0.env: KEY needs KEY",
    ]


@pytest.mark.parametrize(
    ("retry", "type", "expected"),
    [
        ({}, "environment_start_failed", True),
        ({}, "agent_execution_failed", False),
        ({}, "something_new", True),
        ({"exclude": ["environment_start_failed"]}, "environment_start_failed", False),
        ({"include": ["agent_execution_failed"]}, "agent_execution_failed", True),
        ({"include": ["agent_execution_failed"]}, "environment_start_failed", False),
        ({"include": ["verifier_failed"], "exclude": ["verifier_failed"]}, "verifier_failed", False),
    ],
)
def test_which_errors_are_tried_again(retry: dict[str, Any], type: str, expected: bool) -> None:
    assert is_retried(type, RetrySection.model_validate(retry), {}) is expected


def test_the_table_as_the_job_overrides_it_says_what_is_tried_again() -> None:
    overrides = {"verifier_failed": PolicyOverride(should_retry=True)}
    assert is_retried("verifier_failed", RetrySection(), overrides)


def test_delays_grow_up_to_their_maximum() -> None:
    assert [delay_ms(RetrySection(), tries) for tries in range(1, 8)] == [1000, 2000, 4000, 8000, 16000, 30000, 30000]
    assert delay_ms(RetrySection(), 10_000) == 30_000


def test_agents_that_come_with_it(tmp_path: Path) -> None:
    text = """agents:
- name: claude-code
  kwargs: {version: 2.10}
- name: qwen-coder
  model_name: qwen3-coder
- name: codex
  label: mine
  execute: my own bash under a name that is known
  kwargs: {anything: 1}
- name: shell-loop
engine:
  model: {uri: m}
  backend: {kind: mock}
datasets:
- path: d
"""
    config = load(tmp_path, text)
    assert config.agents[0].kwargs == {"version": "2.10"}
    assert config.agents[2].kwargs == {"anything": 1}
    assert config.engine is not None
    assert config.engine.sampling.max_tokens == 4096


def test_a_job_file_of_harbor_may_list_variables_and_leave_out_the_agents(tmp_path: Path) -> None:
    config = load(tmp_path, "environment:\n  env:\n  - A=b=c\n  - TOKEN\ndatasets:\n- path: tasks\n")
    assert config.environment.env == {"A": "b=c", "TOKEN": "${TOKEN}"}
    assert [agent.id for agent in config.agents] == ["oracle"]
    assert ":2: environment.env: has A twice" in fault(
        tmp_path, "environment:\n  env: [A=b, A=c]\ndatasets:\n- path: d\n"
    )


def test_a_job_may_be_named_by_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    values = job_values(["mine", "terminal-bench@2.0", "a/b"], ["codex"], ["openai/gpt-5", "o/m"], 3)
    job = load_settings(JobConfig, None, values)
    assert [(one.path, one.name, one.version, one.n_tasks) for one in job.datasets] == [
        ("mine", None, None, 3),
        (None, "terminal-bench", "2.0", 3),
        ("a/b", None, None, 3),
    ]
    assert [(one.id, one.model_name) for one in job.agents] == [("codex-gpt-5", "openai/gpt-5"), ("codex-m", "o/m")]
    assert job.name == "mine-terminal-bench-2.0-b-codex-gpt-5-m"
    assert job_values(["bundled:harbor"], [], [], None)["agents"] == [{"name": "oracle"}]
