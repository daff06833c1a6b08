"""Executor of the `job` workload: many concurrent trials in sandboxes of one provider."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from rollout.model.errors import AttemptError, ConfigError, InputError
from rollout.snapshots.tar import pack, unpack
from rollout.workloads.experiment.contracts import TrialInput
from rollout.workloads.job.config import ORACLE, AgentSection, JobConfig
from rollout.workloads.job.load_task import TaskUse, load_task
from rollout.workloads.job.record import ARTIFACTS, TrialRecord
from rollout.workloads.job.retries import delay_ms, is_retried
from rollout.workloads.job.task import Task
from rollout.workloads.job.trial import TrialSpec
from rollout.workloads.train.rollouts import TrialPolicy

from rollout_worker.executors.port import Attempt, Context, Done, Run, UnsuitableError
from rollout_worker.executors.train_room import with_room
from rollout_worker.executors.trees import host_directory, shared_tree
from rollout_worker.sandboxes import trees
from rollout_worker.sandboxes.errors import SandboxError
from rollout_worker.sandboxes.port import Provider
from rollout_worker.sandboxes.providers import open_provider
from rollout_worker.trials.agents import make_agent
from rollout_worker.trials.agents.cluster_engine import ClusterEngine
from rollout_worker.trials.agents.model_engine import ModelEngine
from rollout_worker.trials.agents.policy_engine import PolicyEngine
from rollout_worker.trials.contracted import Contracted
from rollout_worker.trials.environment import Images
from rollout_worker.trials.gathering import MANIFEST
from rollout_worker.trials.lanes import Lanes
from rollout_worker.trials.masking import Masks
from rollout_worker.trials.oracle import Oracle
from rollout_worker.trials.outcome import count, record_of
from rollout_worker.trials.port import Agent, Reply, TrialFault, UsageCount
from rollout_worker.trials.streams import Live
from rollout_worker.trials.told import Engine, Told, environs
from rollout_worker.trials.trial import Trial

_log = structlog.get_logger()

CANCEL_S = 10.0
MARK = "\x1e"
"""Mark that `processes.output` reads: what follows on this stream was printed by the named attempt."""


class JobTrials:
    def __init__(self) -> None:
        self._job: JobConfig | None = None
        self._provider: Provider | None = None
        self._lacking: UnsuitableError | None = None
        self._images = Images(Path(), False, {})
        self._lanes = Lanes()
        self._tasks: dict[tuple[str, ...], Task] = {}
        self._trials: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore()

    @property
    def concurrency(self) -> int:
        return self._job.n_concurrent_trials if self._job else 1

    async def start(self, run: Run, context: Context) -> None:
        """Open the provider, which removes what a killed process left."""
        self._job = job = JobConfig.model_validate(run.config["job"])
        self._places = asyncio.Semaphore(job.n_concurrent_trials)
        state = await _state_directory(run, context)
        environment = job.environment
        shares_host = environment.network_mode == "host"
        self._images = Images(state, environment.force_build, environment.provider_config, shares_host)
        try:
            provider = open_provider(environment.type, state, environment.provider_config, key="environment.type")
            await self._open(provider, run)
        except (ConfigError, SandboxError) as error:
            # Another worker may have what this one lacks, so every trial goes back by itself.
            self._lacking = UnsuitableError(error.message, code=error.code, retry=error.retryable)
            _log.warning("sandboxes_missing", provider=environment.type, run_id=run.run_id, why=error.message)

    async def _open(self, provider: Provider, run: Run) -> None:
        try:
            await provider.open()
            capabilities = await provider.probe()
        except BaseException:
            await provider.close()
            raise
        self._provider = provider
        _log.info("sandboxes_ready", provider=provider.name, run_id=run.run_id, notes=list(capabilities.notes))

    async def close(self) -> None:
        if self._trials:
            await asyncio.wait(self._trials)
        if self._provider is not None:
            provider, self._provider = self._provider, None
            await provider.close()

    # ---- one trial

    async def run(self, attempt: Attempt, context: Context) -> Done:
        if self._lacking is not None:
            raise self._lacking
        try:
            spec = TrialSpec.decode(attempt.payload)
        except InputError as error:
            raise AttemptError(error.message, code="bad_payload", retry=False) from error
        if spec.policy is None:
            return await self._run(spec, attempt, context)
        # It gives its slot back whenever it asks, so what runs at once is counted here. Whoever has no place yet gives
        # back its own, too: else trials took all that the worker asks for, and what they ask could not come here.
        waiting = asyncio.ensure_future(_wait_as_parent(context)) if self._places.locked() else None
        try:
            await self._places.acquire()
        finally:
            if waiting is not None:
                waiting.cancel()
                await asyncio.wait([waiting])
        try:
            return await self._run(spec, attempt, context)
        finally:
            self._places.release()

    async def _run(self, spec: TrialSpec, attempt: Attempt, context: Context) -> Done:
        told = await self._prepare(spec, attempt, context)
        trial = Trial(told, lambda: _agent(told))
        running = asyncio.ensure_future(trial.run())
        self._trials.add(running)
        running.add_done_callback(self._trials.discard)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # an agent may take one for something else
                running.cancel()
                await asyncio.wait([running], timeout=CANCEL_S)
            raise
        told.progress("storing its files")
        files = await self._store(told, context)
        counted = count(told, trial.outcome)
        record = record_of(told, trial.outcome, counted, files)
        if told.policy is not None:
            record = record.model_copy(update={"policy": told.policy.recorded()})
        return self._told_to_engine(record, counted.is_valid, attempt, trial, files)

    def _told_to_engine(
        self, record: TrialRecord, is_valid: bool, attempt: Attempt, trial: Trial, files: bytes
    ) -> Done:
        """Return the result of a trial. Raises AttemptError if it has no valid reward."""
        assert self._job is not None
        tokens = record.usage.n_input_tokens + record.usage.n_output_tokens
        micro_dollars = round(record.result.cost * 1e6)
        if trial.policy is not None:
            tokens = micro_dollars = 0  # of its run, tokens are counted where they were drawn
        error = record.result.error
        if error is None or is_valid:
            return Done(record.encode(), units_in=tokens, units_out=micro_dollars, keeps=(files,))
        fault = trial.outcome.error or next((step.error for step in trial.outcome.steps if step.error), None)
        asked = fault.retry_after_s if fault is not None else None
        delay = delay_ms(self._job.retry, attempt.attempt)
        raise AttemptError(
            error.message,
            code=error.type,
            retry=is_retried(error.type, self._job.retry, self._job.override_error_policy),
            data=record.encode(),
            keeps=(files,),
            units_in=tokens,
            units_out=micro_dollars,
            retry_after_ms=delay if asked is None else max(delay, round(asked * 1000)),
        )

    async def _prepare(self, spec: TrialSpec, attempt: Attempt, context: Context) -> Told:
        assert self._job is not None and self._provider is not None
        section = next((one for one in self._job.agents if one.id == spec.agent), None)
        if section is None:
            raise AttemptError(f"the job has no agent {spec.agent}", code="bad_payload", retry=False)
        task = await self._task(spec, section, context)
        try:
            variables = environs(self._job, section, task, os.environ, agent_works=spec.regrade is None)
        except ValueError as error:
            message = f"{error} (on this worker, in whose environment variables are filled in)"
            raise UnsuitableError(message, code="variable_missing", retry=False) from error
        files = context.scratch / "files"
        files.mkdir(parents=True, exist_ok=True)
        masks = Masks(variables.hidden)
        engines = self._job.engine

        policy = _policy(spec, attempt, context)

        def engine(usage: UsageCount) -> Engine:
            if policy is not None:
                policy.usage = usage
                return policy
            if spec.engine:
                return ModelEngine(ClusterEngine(attempt.id, attempt.attempt, context, usage, spec.engine))
            if engines is None:
                return NoEngine()
            return ClusterEngine(attempt.id, attempt.attempt, context, usage)

        return Told(
            spec=spec,
            job=self._job,
            section=section,
            task=task,
            provider=self._provider,
            environs=variables,
            files=files,
            masks=masks,
            live=Live(spec.label, _printer(attempt), self._job.n_concurrent_trials),
            images=self._images,
            lanes=self._lanes,
            engine=engine,
            policy=policy,
            progress=lambda phase: context.progress(phase, trial=spec.label, phase=phase, agent=spec.agent),
            is_last_try=attempt.attempt >= attempt.spec.max_attempts,
            tree=lambda checksum: shared_tree(bytes.fromhex(checksum), context),
            regrade=await self._earlier(spec, context),
            contract=await self._contracted(spec, attempt, files, context),
        )

    async def _task(self, spec: TrialSpec, section: AgentSection, context: Context) -> Task:
        """Return the task, whose directory all processes of the host share. Raises AttemptError if it cannot be run."""
        assert self._job is not None
        key = (spec.checksum, spec.dataset, spec.task, spec.dialect, section.name)
        if key not in self._tasks:
            use = TaskUse(verify=not self._job.verifier.disable, oracle=section.name == ORACLE, strict=False)
            try:
                directory = await shared_tree(bytes.fromhex(spec.checksum), context)
                loaded = await asyncio.to_thread(
                    load_task, directory, use, name=spec.task, dialect=spec.dialect, git_commit_id=spec.commit
                )
            except AttemptError as error:
                if error.error_code != "not_found":  # of the object store, by way of the worker
                    raise
                message = f"its files cannot be had from the store: {error.message}"
                raise AttemptError(message, code="task_not_found", retry=False) from error
            except ConfigError as error:
                raise AttemptError(error.message, code="task_invalid", retry=False) from error
            self._tasks[key] = loaded.task
        return self._tasks[key]

    async def _earlier(self, spec: TrialSpec, context: Context) -> Path | None:
        if spec.regrade is None:
            return None
        directory = context.scratch / "earlier"
        await self._unpack(bytes.fromhex(spec.regrade), directory, context)
        return directory

    async def _contracted(self, spec: TrialSpec, attempt: Attempt, files: Path, context: Context) -> Contracted | None:
        if spec.contract is None:
            return None
        try:
            given = TrialInput.of_payload(spec.contract, attempt.run.run_id)
            before = TrialRecord.decode(attempt.predecessor) if attempt.predecessor else None
        except InputError as error:
            raise AttemptError(error.message, code="bad_payload", retry=False) from error
        directory = context.scratch / "predecessor"
        if before is not None and before.files is not None:
            await self._unpack(bytes.fromhex(before.files), directory, context)
        elif before is None and spec.begins_with:
            shared = await shared_tree(bytes.fromhex(spec.begins_with), context)
            await asyncio.to_thread(shutil.copytree, shared, directory)  # what is in it is moved
        else:
            directory = None
        return Contracted(given, files, directory)

    async def _unpack(self, files: bytes, directory: Path, context: Context) -> None:
        await asyncio.to_thread(unpack, await context.object_path(files), directory, files)

    async def _store(self, told: Told, context: Context) -> bytes:
        """Store everything large as one object."""
        await asyncio.to_thread(_hide_names, told)
        archive = told.files.with_name("files.tar")
        await with_room(
            "the files of a trial cannot be packed", lambda: asyncio.to_thread(pack, told.files, archive), context
        )
        await asyncio.to_thread(trees.remove, str(told.files))
        return await with_room("the files of a trial cannot be stored", lambda: context.put_object(archive), context)


def _hide_names(told: Told) -> None:
    """Mask secrets in file names, once nothing looks for files by the names that the agent gave them."""
    told.masks.names(told.files)
    for manifest in told.files.glob(f"**/{ARTIFACTS}/{MANIFEST}"):
        told.masks.file(manifest)


def _agent(told: Told) -> Agent:
    """Return the agent. Raises TrialFault."""
    section = told.section
    if section.name == ORACLE and not section.own:
        return Oracle(told.task.dialect.solution_mount, told.environs.solution)
    return make_agent(section)


class NoEngine:
    """Engine of a job whose file names none."""

    async def ask(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> Reply:
        raise TrialFault("agent_model_not_found", "the agent asks for an engine, and the job file has no key engine")


async def _wait_as_parent(context: Context) -> None:
    async for _ in context.children():
        return


def _policy(spec: TrialSpec, attempt: Attempt, context: Context) -> PolicyEngine | None:
    if spec.policy is None:
        return None
    try:
        return PolicyEngine(attempt.id, attempt.attempt, context, TrialPolicy.of(spec.policy))
    except InputError as error:
        raise AttemptError(error.message, code="bad_payload", retry=False) from error


def _printer(attempt: Attempt):
    mark = f"{MARK}{attempt.key.log}.{attempt.key.seq}.{attempt.attempt}\n"

    def show(line: str) -> None:
        sys.stdout.write(f"{mark}{line}\n")
        sys.stdout.flush()

    return show


async def _state_directory(run: Run, context: Context) -> Path:
    """Return the directory where this host's sandboxes are claimed.

    All processes and runs share it, so that they share the host's capacity and a new process removes what a killed one
    left.
    """
    known = list(run.config.get("trees", {}).values())
    if not known:
        return context.scratch / "sandboxes"
    source = await context.object_path(bytes.fromhex(known[0]))
    return host_directory(source, context, "sandboxes")
