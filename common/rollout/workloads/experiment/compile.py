"""Compiles an experiment to a job: a variant becomes an agent, a slot of the schedule a trial, and each image with its
workspace a task directory."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from rollout.model.item import ItemSpec, NewItem
from rollout.model.run import Policy
from rollout.workloads.experiment.config import LOCAL, ExperimentConfig, NetworkKeys, VariantKeys
from rollout.workloads.experiment.contracts import (
    AGENT,
    CONTRACT,
    RESULT_FILE,
    TASK_FILE,
    WORKSPACE,
    Chain,
    Dependencies,
    Ids,
    Network,
    SandboxPolicy,
    TrialInput,
    TrialPolicy,
)
from rollout.workloads.experiment.engines import NO_ENGINES, Engines
from rollout.workloads.experiment.freezing import FUNCTION_AGENT
from rollout.workloads.experiment.resolve import Resolved, positions
from rollout.workloads.experiment.schedule import trial_id
from rollout.workloads.experiment.tasks import Task
from rollout.workloads.job.config import JobConfig
from rollout.workloads.job.errors import ERRORS
from rollout.workloads.job.task_directory import scan
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.json_form import JsonObject, canonical

CONTRACT_AGENT = "rollout_worker.trials.agents.contract:ContractAgent"
EXECUTOR = "job"
_SCHEMA = b"experiment\x01"
_OF_THE_RUNNER = "environment_teardown_failed"
"""The type of an error that happens after a trial has its result."""
_NETWORKS = {"none": "no-network", "full": "public", "allowlist_enforced": "allowlist"}
_PATHS = {
    "AGENTLAB_TASK_PATH": TASK_FILE,
    "AGENTLAB_RESULT_PATH": RESULT_FILE,
    "AGENTLAB_GRADING_DIR": "/tests/assets",
    "AGENTLAB_GRADE_PATH": "/logs/verifier/grade.json",
}
_RETRY_DELAY_MS = 1000
NO_STATES: Mapping[str, str] = MappingProxyType({})


def job_of(resolved: Resolved) -> JobConfig:
    """Return the job with the experiment's trials."""
    config = resolved.config
    sandbox, retry = config.runtime.policy.sandbox, config.policy.retry
    grading = config.grading
    values: JsonObject = {
        "name": config.experiment.id,
        "n_attempts": config.design.replications,
        "n_concurrent_trials": config.design.max_concurrency,
        "retry": {
            "max_attempts": retry.max_attempts if retry.types else 1,
            "include": retry.types,
            "initial_delay_ms": _RETRY_DELAY_MS,
        },
        "environment": {
            "type": sandbox.mode,
            "provider_config": _provider_config(config),
            "override_cpus": sandbox.resources.cpus,
            "override_memory": sandbox.resources.memory,
            "override_storage": sandbox.resources.storage,
        },
        "verifier": {
            "disable": grading is None,
            "env": {} if grading is None else grading.env,
            "override_timeout_sec": None if grading is None else grading.timeout_ms / 1000,
        },
        "agents": [_agent(resolved, variant) for variant in resolved.variants],
        "override_error_policy": {
            # A grader that fails because its agent has would hide why.
            name: {"has_valid_reward": False, "should_grade": False if row.phase == "execute" else None}
            for name, row in ERRORS.items()
            if (row.valid_reward or row.graded) and name != _OF_THE_RUNNER
        },
        "infrastructure": {"min_success_rate": 0.0},
    }
    return JobConfig.model_validate(values)


def _provider_config(config: ExperimentConfig) -> JsonObject:
    given = config.runtime.policy.sandbox.provider_config
    local = config.provider == "bubblewrap" and not config.is_per_task
    has_image = config.image or any(variant.image for variant in config.variants)
    return {"image": "host", **given} if local and not has_image else given


def _agent(resolved: Resolved, variant: VariantKeys) -> JsonObject:
    runtime = resolved.config.runtime
    artifact = {"artifact": resolved.artifact} if resolved.artifact else {}
    return {
        "label": variant.variant_id,
        "import_path": CONTRACT_AGENT,
        "env": {**runtime.env, **variant.env},
        "kwargs": {"command": command_of(_command(resolved.config), variant.args), **artifact},
        "override_timeout_sec": runtime.policy.timeout_ms / 1000,
        "n_concurrent": variant.max_parallel_trials,
    }


def _command(config: ExperimentConfig) -> list[str] | str:
    runtime = config.runtime
    if runtime.function is not None:
        return ["python3", f"{AGENT}/{FUNCTION_AGENT}", runtime.function]
    assert runtime.command is not None
    return runtime.command


def command_of(command: list[str] | str, args: list[str]) -> list[str]:
    """Append `args` to a command and return its words. A string is run by /bin/sh."""
    if isinstance(command, list):
        return [*command, *args]
    return ["/bin/sh", "-c", f'{command} "$@"' if args else command, "sh", *args]


# ---- task directories


def write_trees(
    resolved: Resolved, directory: Path, assets: Path | None
) -> dict[tuple[str | None, str], tuple[str, Path]]:
    """Write a task directory below `directory` for each image and workspace, and return (checksum, path) of each.
    `assets` is the directory that the grader needs. Blocking."""
    found: dict[tuple[str | None, str], tuple[str, Path]] = {}
    for variant in resolved.variants:
        for task in resolved.tasks:
            key = resolved.image_of(variant, task), workspace_of(resolved.config, task)
            if key not in found:
                path = directory / f"task-{len(found):04d}"
                _write_tree(path, resolved.config, assets, *key)
                found[key] = scan(path).checksum, path
    return found


def workspace_of(config: ExperimentConfig, task: Task) -> str:
    return (task.workspace if config.is_per_task else None) or config.runtime.workspace or WORKSPACE


def _write_tree(path: Path, config: ExperimentConfig, assets: Path | None, image: str | None, workspace: str) -> None:
    path.mkdir(parents=True)
    (path / "task.toml").write_text(_task_toml(config, image, workspace))
    (path / "instruction.md").write_text(f"The task is in {TASK_FILE}.\n")
    if image is None:
        (path / "environment").mkdir()
        (path / "environment" / "Dockerfile").write_text(f"FROM scratch\nWORKDIR {CONTRACT}\nWORKDIR {workspace}\n")
    if config.grading is not None:
        (path / "tests").mkdir()
        script = path / "tests" / "test.sh"
        script.write_text(_grader(config.grading.command, workspace))
        script.chmod(0o755)
        if assets is not None:
            shutil.copytree(assets, path / "tests" / "assets")


def _task_toml(config: ExperimentConfig, image: str | None, workspace: str) -> str:
    network = _network(config.runtime.policy.network)
    environment = {**network, **({"docker_image": image, "workdir": workspace} if image is not None else {})}
    lines = ['schema_version = "1.4"', 'dialect = "harbor"', "[verifier]", "keep_processes = false", "[environment]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in environment.items())]) + "\n"


def _network(keys: NetworkKeys) -> JsonObject:
    hosts = {"allowed_hosts": keys.allowed_hosts} if keys.mode == "allowlist_enforced" else {}
    return {"network_mode": _NETWORKS[keys.mode], **hosts}


def _grader(command: list[str] | str, workspace: str) -> str:
    """Return a script that keeps the grader's exit code and output; the verification decides whether they are a grade.
    In the task's dialect, no exit code makes a trial fail."""
    words = shlex.join(command_of(command, []))
    return "\n".join(
        [
            "#!/bin/sh",
            f"cd {shlex.quote(workspace)} || exit 125",
            *(f"export {name}={shlex.quote(value)}" for name, value in _PATHS.items()),
            f"{words}",
            "code=$?",
            'printf "%s\\n" "$code" > /logs/verifier/grader_exit_code',
            'if [ -L "$AGENTLAB_GRADE_PATH" ]; then',
            '  echo "$AGENTLAB_GRADE_PATH is a link: write a regular file" >&2',
            'elif [ -f "$AGENTLAB_GRADE_PATH" ]; then',
            '  cp "$AGENTLAB_GRADE_PATH" /logs/verifier/reward.json',
            "fi",
            'exit "$code"',
            "",
        ]
    )


# ---- the run


def policies_of(config: ExperimentConfig) -> tuple[Policy, ...]:
    after = config.policy.pruning.max_consecutive_failures
    return () if after is None else (Policy("prune_lane", (("after", str(after)),)),)


class Items:
    """The trials of an experiment as items, in the order of its schedule. `checksums` are those of `write_trees`.
    `states` has, by chain, the tree that its first trial of this run starts with."""

    def __init__(
        self,
        resolved: Resolved,
        job: JobConfig,
        checksums: dict[tuple[str | None, str], str],
        engines: Engines = NO_ENGINES,
        states: Mapping[str, str] = NO_STATES,
    ) -> None:
        self._resolved = resolved
        self._states = states
        self._engines = engines
        self._job = job
        self._checksums = checksums
        self._positions = positions(resolved.chains)
        self._settings = canonical(
            [job.model_dump(mode="json", include={"environment", "verifier"}), resolved.artifact, resolved.assets]
        )
        self._agents = {agent.id: canonical(agent.model_dump(mode="json")) for agent in job.agents}
        self._spec = cache(self._new_spec)

    def __len__(self) -> int:
        return len(self._resolved.slots)

    def input(self, index: int) -> TrialInput:
        """Return the input of slot `index`, without the id of the run."""
        resolved, config = self._resolved, self._resolved.config
        slot = resolved.slots[index]
        variant, task = resolved.variants[slot.variant_idx], resolved.tasks[slot.task_idx]
        chain = resolved.chains[index]
        return TrialInput(
            schedule_index=index,
            ids=Ids(
                run_id="-",
                trial_id=trial_id(index),
                variant_id=variant.variant_id,
                task_id=task.task_id,
                repl_idx=slot.repl_idx,
            ),
            task=task.row,
            bindings=variant.bindings,
            dependencies=Dependencies(services=config.runtime.dependencies.services),
            policy=_policy(config, resolved.image_of(variant, task)),
            workspace=workspace_of(config, task),
            evidence=config.evidence,
            chain=None
            if chain is None
            else Chain(chain_id=chain, state_policy=config.policy.state_policy, position=self._positions[index]),
        )

    def item(self, index: int) -> NewItem:
        """Return the item of slot `index`."""
        given = self.input(index)
        checksum = self._checksums[given.policy.sandbox.image, given.workspace]
        ids, chain = given.ids, self._resolved.chains[index] or ""
        contract, begins_with = given.payload(), self._states.get(chain, "")
        identity = blake3(_SCHEMA)
        parts = [self._settings, self._agents[ids.variant_id], checksum.encode(), canonical(contract)]
        if model := self._engines.identity(ids.variant_id):
            parts.append(canonical(model))
        if begins_with:
            parts.append(begins_with.encode())
        for part in parts:
            identity.update(len(part).to_bytes(8, "little") + part)
        item = identity.digest()
        spec = TrialSpec(
            id=item.hex(),
            dataset=self._resolved.config.experiment.id,
            task=ids.task_id,
            checksum=checksum,
            dialect="harbor",
            agent=ids.variant_id,
            attempt=ids.repl_idx + 1,
            contract=contract,
            engine=self._engines.executors.get(ids.variant_id, ""),
            begins_with=begins_with,
        )
        return NewItem(item, spec.encode(), self._spec(ids.variant_id, chain))

    def _new_spec(self, lane: str, chain: str) -> ItemSpec:
        retry = self._job.retry
        return ItemSpec(
            lane=lane,
            chain=chain,
            executor=EXECUTOR,
            max_attempts=retry.max_attempts,
            retry_backoff_ms=min(retry.initial_delay_ms, 60_000),
        )


def _policy(config: ExperimentConfig, image: str | None) -> TrialPolicy:
    policy = config.runtime.policy
    resources = policy.sandbox.resources.model_dump(mode="json", exclude_none=True)
    return TrialPolicy(
        timeout_ms=policy.timeout_ms,
        network=Network(mode=policy.network.mode, allowed_hosts=policy.network.allowed_hosts),
        sandbox=SandboxPolicy(mode=policy.sandbox.mode, image=image, resources=resources or None),
    )


def needs_programs_of_the_host(config: ExperimentConfig) -> bool:
    """Return whether sandboxes have no image, so that workers must have the programs that the agent's command names."""
    images = config.image or any(variant.image for variant in config.variants)
    return config.provider in LOCAL and not config.is_per_task and not images
