"""Runs a trial phase by phase: environment setup, agent install, agent execution, verification, teardown."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

import structlog
from rollout.cloud.shielded import to_the_end
from rollout.workloads.job.errors import INTERNAL_ERROR, policy_of
from rollout.workloads.job.network import NetworkPolicy
from rollout.workloads.job.pass_at_k import PASS
from rollout.workloads.job.record import AGENT, ARTIFACTS, SERVICES_ENDED, SETUP, VERIFIER
from rollout.workloads.job.retries import is_retried
from rollout.workloads.job.rewards import Rewards, misses, single
from rollout.workloads.job.task import Step

from rollout_worker.sandboxes.port import Sandbox
from rollout_worker.trials.agents.plain import NopAgent
from rollout_worker.trials.agents.policy_address import Answering, PolicyAddress
from rollout_worker.trials.agents.policy_engine import PolicyEngine
from rollout_worker.trials.clean import killed_after, mend, preload_of, restore_preload, running
from rollout_worker.trials.ending import end
from rollout_worker.trials.evidence import Evidence, check_grade
from rollout_worker.trials.faults import BY_AGENT, faults
from rollout_worker.trials.gathering import (
    ARTIFACTS_DIRECTORY,
    FAILED,
    TOO_LARGE,
    bring_artifacts,
    bring_logs,
    empty_of,
)
from rollout_worker.trials.health import until_healthy
from rollout_worker.trials.making import LOGS, Made, Wish, make_sandbox
from rollout_worker.trials.oracle import Oracle
from rollout_worker.trials.outcome import Outcome, StepOutcome, count
from rollout_worker.trials.place import TrialPlace
from rollout_worker.trials.port import Agent, TrialFault
from rollout_worker.trials.preserving import preserve
from rollout_worker.trials.streams import Streams
from rollout_worker.trials.told import Told
from rollout_worker.trials.verifying import forget, verify
from rollout_worker.trials.verifying_apart import put_back, verify_apart

log = structlog.get_logger()

AGENT_LOGS = "/logs/agent"
STUCK_S = 900.0
"""Time limit for copies out of and into a sandbox while the agent's processes are running there."""
LATE_S = 5.0
"""A command that runs at the deadline ends then, and its output is kept; its agent has this much longer."""


class Trial:
    """Run it once. The result is in `outcome`, however it ends."""

    def __init__(self, told: Told, make_agent: Callable[[], Agent]) -> None:
        """`make_agent` may raise TrialFault."""
        self.outcome = Outcome()
        self._told = told
        self._make_agent = make_agent
        self._agent: Agent = NopAgent()
        self._workdir = ""
        self._preload: bytes | None = None
        self._before: frozenset[int] = frozenset()  # processes that were there before the oracle
        self._made: Made | None = None
        self._address: PolicyAddress | None = None
        self._answering: Answering | None = None
        self._evidence = None if told.contract is None else Evidence(told, told.contract)

    @property
    def policy(self) -> PolicyEngine | None:
        return self._told.policy

    async def run(self) -> None:
        """Run the trial and remove everything of it, even if it is cancelled."""
        cancelled = True
        try:
            await self._phases()
            cancelled = False
        except TrialFault as fault:
            cancelled = False
            self.outcome.error = fault
        except Exception as error:
            cancelled = False
            log.exception("trial_broke", trial=self._told.spec.label)
            told = traceback.format_exc()
            self.outcome.error = TrialFault(INTERNAL_ERROR, f"{type(error).__name__}: {error}")
            (self._told.files / "exception.txt").write_text(self._told.masks.text(told), errors="backslashreplace")
        finally:
            self.outcome.agent_version = self._agent.version
            await to_the_end(self._tear_down(cancelled=cancelled))
        if self._evidence is not None:
            try:
                await asyncio.to_thread(self._evidence.write, self.outcome)
            except TrialFault as fault:
                self.outcome.error = self.outcome.error or fault

    async def _phases(self) -> None:
        told = self._told
        place = None
        if told.regrade is None:
            self._agent = self._make_agent()
            await self._set_up()
            place = TrialPlace(told, self._made_there(), self.outcome.usage)
            self._answering = place.answering
            if self._answering is not None:
                self._address = PolicyAddress(self._answering)
                with faults("environment_start_failed", "the model was given an address in it"):
                    await self._address.open(self._made_there().sandbox)
                told.masks.hide([self._address.key])
                place.env = {**place.env, **self._address.env}
            await self._install(place)
            if self._evidence is not None:
                await self._evidence.before(self._made_there())
        elif any(step.verifier.environment is None for step in told.task.steps):
            await self._set_up()
        for index, step in enumerate(told.task.steps):
            done = StepOutcome(step.name)
            self.outcome.steps.append(done)
            if not await self._step(index, step, done, place):
                break

    # ---- environment setup

    async def _set_up(self) -> None:
        told, task = self._told, self._told.task
        told.progress("environment setup")
        with self.outcome.times.phase("environment_setup"), self._streams(None, SETUP) as streams:
            policies, users = list[NetworkPolicy](), list[str | None]()
            if told.regrade is None and told.section.install:
                policies.append(task.environment.network)
            for step in task.steps:
                policies.append(step.agent.network)
                users.append(step.agent.user)
                if step.verifier.environment is None and not told.job.verifier.disable:
                    policies.append(step.verifier.network)
                    users.append(step.verifier.user)
            build_s = told.timeouts(task.steps[0]).build_s
            wish = Wish(task.environment, policies, told.environs.sandbox, users, build_s, "environment setup")
            self._made = await make_sandbox(told, wish, self.outcome.times)
            sandbox, self._workdir = self._made.sandbox, self._made.workdir
            self.outcome.network = sandbox.spec.network.mode
            self.outcome.remarks += [*self._made.remarks, *self._unused()]
            if task.environment.healthcheck is not None:
                told.progress("waiting for its health")
                await until_healthy(task.environment.healthcheck, self._made, streams)
            with faults("environment_start_failed", "it was set up"):
                self._preload = await preload_of(sandbox)

    def _unused(self) -> list[str]:
        """Return remarks on inputs for an agent that no agent here uses."""
        environment, section = self._told.task.environment, self._told.section
        wanted = {
            "mcp_servers of the task": environment.mcp_servers,
            "skills_dir of the task": environment.skills_dir,
            "skills of the agent": section.skills,
        }
        return [f"{name}: agents are not given these here" for name, value in wanted.items() if value]

    # ---- the agent

    async def _install(self, place: TrialPlace) -> None:
        step = self._told.task.steps[0]
        self._told.progress("agent install")
        limit = self._told.timeouts(step).install_s
        with self.outcome.times.phase("agent_setup"), self._streams(None, SETUP) as streams:
            place.begin(streams, limit, "agent_install_timeout", step.agent.user, works=False)
            async with self._ends(place, limit, "agent_install_failed", works=False):
                await self._agent.install(place)

    async def _execute(self, index: int, step: Step, place: TrialPlace) -> None:
        told, has_worked = self._told, index > 0
        instruction = await asyncio.to_thread((told.task.directory / step.instruction).read_bytes)
        with faults("environment_start_failed", "the instruction was written", by_agent=has_worked):
            await place.sandbox.write_file(told.job.instruction_path, instruction)
        if step.healthcheck is not None:
            with self._streams(step, SETUP) as streams:
                await until_healthy(step.healthcheck, self._made_there(), streams, by_agent=has_worked)
        if isinstance(self._agent, Oracle):
            self._agent.solution = None if step.solution is None else told.task.directory / step.solution
            if not step.verifier.keeps_processes:
                with faults("environment_start_failed", "its processes were listed", by_agent=has_worked):
                    self._before = frozenset(await running(place.sandbox))
        lane = told.section.lane
        if told.lanes.left(lane) > 0:
            told.progress("waiting, since its service asked for a pause")
            await told.lanes.wait(lane)
        told.progress("agent execution")
        limit = told.timeouts(step).agent_s
        with self.outcome.times.phase("agent_execution"), self._streams(step, AGENT) as streams:
            place.begin(streams, limit, "agent_execution_timeout", step.agent.user, works=True)
            try:
                async with self._ends(place, limit, BY_AGENT, works=True):
                    await self._work(place, instruction.decode(errors="replace"))
            except TrialFault as fault:
                if fault.type in ("api_rate_limited", "api_overloaded"):
                    wait = told.lanes.refused(lane, fault.retry_after_s)
                    log.info("lane_paused", lane=lane, seconds=wait, why=fault.type)
                raise
            told.lanes.passed(lane)

    async def _work(self, place: TrialPlace, instruction: str) -> None:
        """Let the agent work. If it gets no answers, it may end as if it had failed."""
        model = self._answering
        try:
            await self._agent.execute(place, instruction)
        except Exception as error:
            if model is not None and model.broken is not None:
                raise model.broken from error
            raise
        if model is not None and model.broken is not None:
            raise model.broken

    @asynccontextmanager
    async def _ends(self, place: TrialPlace, limit: float | None, type: str, *, works: bool) -> AsyncGenerator[None]:
        """End the agent at its deadline. Its exceptions become a TrialFault, of `type` unless they have another.

        `works` means that it works on its task, rather than being installed.
        """
        place.limits_hit.clear()
        deadline = asyncio.timeout(None if limit is None else limit + LATE_S)

        def at_limit() -> None:
            if not place.commands and not deadline.expired():
                deadline.reschedule(loop.time())

        loop = asyncio.get_running_loop()
        timer = None if limit is None else loop.call_later(limit, at_limit)
        try:
            async with deadline:
                with faults(type, "the agent worked", by_agent=works):
                    yield
        except TimeoutError as error:
            raise (place.overdue() if deadline.expired() else TrialFault(type, f"TimeoutError: {error}")) from error
        except TrialFault as fault:
            if fault.type == type and "memory" in place.limits_hit:
                found = "environment_out_of_memory" if works else type
                raise TrialFault(found, f"the sandbox's memory limit was hit: {fault.message}") from fault
            if fault.type == "api_bad_request" and works and self.outcome.usage.output_tokens:
                # It had answered this job's requests: what it refuses now is what the agent has added to one.
                raise TrialFault(BY_AGENT, f"the service refused what the agent asked: {fault.message}") from fault
            raise
        except Exception as error:
            log.warning("agent_broke", trial=self._told.spec.label, exc_info=True)
            raise TrialFault(type, f"{error.__class__.__name__}: {error}") from error
        finally:
            if timer is not None:
                timer.cancel()
            place.end()
            self.outcome.remarks += place.notes
            place.notes.clear()

    # ---- a step

    async def _step(self, index: int, step: Step, done: StepOutcome, place: TrialPlace | None) -> bool:
        """Run a step, and return whether another may follow. `place` is None if no agent works."""
        told = self._told
        if place is not None:
            try:
                await self._execute(index, step, place)
            except TrialFault as fault:
                done.error = fault
                if policy_of(fault.type).phase not in ("execute", "install"):
                    raise
            if "storage" in place.limits_hit:  # else everything that verifies it would be ended, too
                with faults("environment_lost", "its storage was measured", by_agent=True):
                    await place.sandbox.allow_more_storage()
            async with self._watched(step):
                await self._end_agent(step, done)
                if self._evidence is not None:
                    await self._bring_evidence(self._evidence, done)
        if told.job.verifier.disable:
            return done.error is None
        if place is not None and not self._is_graded(done.error):
            self.outcome.is_cut = True
            return False
        try:
            with self.outcome.times.phase("verifier"):
                async with self._watched(step, told.timeouts(step).verifier_s):
                    rewards = await self._verify(index, step)
                    if self._evidence is not None:
                        check_grade(rewards)
                    done.rewards = rewards
        except TrialFault as fault:
            if done.error is not None:
                fault.message += f"; before that, {done.error.type}: {done.error.message}"
            done.error = fault
            if policy_of(fault.type).blame != "verifier":
                raise
        return misses(done.rewards, step.min_reward) is None

    async def _bring_evidence(self, evidence: Evidence, done: StepOutcome) -> None:
        try:
            await evidence.after(self._made_there())
        except TrialFault as fault:
            if policy_of(fault.type).phase != "execute":
                raise
            done.error = done.error or fault
        finally:
            self.outcome.remarks += evidence.remarks

    def _watched(self, step: Step, more_s: float = 0.0) -> AbstractAsyncContextManager[None]:
        """Guard the block against processes that the agent left running."""
        if self._made is None or not step.verifier.keeps_processes:
            return nullcontext()
        return killed_after(self._made.sandbox, STUCK_S + more_s)

    def _is_graded(self, error: TrialFault | None) -> bool:
        if error is None:
            return True
        told = self._told
        if not told.is_last_try and is_retried(error.type, told.job.retry, told.job.override_error_policy):
            return False
        policy = policy_of(error.type, told.job.override_error_policy)
        return policy.graded and told.task.dialect.verifies_after_agent_error

    async def _end_agent(self, step: Step, done: StepOutcome) -> None:
        """End what the agent left running, unless the task keeps it, and copy its files out. Its command has ended
        before."""
        told = self._told
        made, keeps = self._made_there(), step.verifier.keeps_processes
        sandbox = made.sandbox
        with faults("environment_lost", "the agent was ended", by_agent=True):
            if not keeps:
                await self._note_services(step, sandbox)
                await made.kill()
            elif done.error is not None and done.error.type == "agent_execution_timeout":
                await made.start_entrypoint()  # a deadline has ended everything
            if await restore_preload(sandbox, self._preload):
                self.outcome.remarks.append("the agent had changed what every program loads first: it was put back")
        if step.verifier.collect and not told.job.verifier.disable:
            await self._collect(step, sandbox, keeps=keeps)
        if keeps and step.verifier.environment is not None and self._told.task.steps[-1] is step:
            with faults("environment_lost", "the agent was ended", by_agent=True):
                await sandbox.kill()  # it is of no use to a verifier elsewhere
        with faults("environment_lost", "its logs were copied", by_agent=True):
            empty = await empty_of(sandbox, AGENT_LOGS, ARTIFACTS_DIRECTORY)
            if AGENT_LOGS not in empty:
                self.outcome.remarks += await bring_logs(sandbox, AGENT_LOGS, told.directory(step, AGENT), told.masks)
            artifacts = [*step.artifacts, *told.job.artifacts]
            target = told.directory(step, ARTIFACTS)
            brought = await bring_artifacts(sandbox, self._workdir, artifacts, target, empty)
            failed = [one for one in brought if one.status in (FAILED, TOO_LARGE)]  # one that is missing is no fault
            self.outcome.remarks += [f"artifact {one.source}: {one.message}" for one in failed]

    async def _note_services(self, step: Step, sandbox: Sandbox) -> None:
        """Remark on the oracle: a solution may fail because a service that it started has been ended."""
        if not isinstance(self._agent, Oracle) or step.verifier.environment is not None:
            return
        left = sorted({name for pid, name in (await running(sandbox)).items() if pid not in self._before})
        if left:
            self.outcome.remarks.append(
                f"{SERVICES_ENDED}: {', '.join(left[:5])}; keep_processes = true under [verifier] lets them go on"
            )

    async def _collect(self, step: Step, sandbox: Sandbox, *, keeps: bool) -> None:
        with self._streams(step, VERIFIER) as streams:
            with faults("environment_lost", "artifacts were collected", by_agent=True):
                await mend(sandbox, self._workdir, *LOGS)
            for collect in step.verifier.collect:
                if collect.service != "main":
                    self.outcome.remarks.append(f"collect: there is no service {collect.service} here")
                    continue
                with faults("environment_lost", "artifacts were collected", by_agent=True):
                    finished = await sandbox.exec(
                        collect.command,
                        cwd=self._workdir,
                        user=collect.user,
                        timeout_s=collect.timeout_sec,
                        on_output=streams.feed,
                    )
                    if not keeps:
                        await self._made_there().kill()
                if not finished.ok:
                    self.outcome.remarks.append(f"collect: {collect.command[:80]}: {finished.how} {finished.exit_code}")

    # ---- verification

    async def _verify(self, index: int, step: Step) -> Rewards:
        told, outcome = self._told, self.outcome
        told.progress("verification")
        with self._streams(step, VERIFIER) as streams:
            if (environment := step.verifier.environment) is not None:
                if self._is_over(index):
                    await self._destroy()  # its room may be what the next one waits for
                room_s = None if self._made is None else told.timeouts(step).build_s
                return await verify_apart(told, index, environment, outcome, streams, room_s=room_s)
            made, env = self._made_there(), told.environs.verifiers[index]
            if told.contract is not None:
                env = {**env, **told.contract.grader_env}
            if told.regrade is not None:
                await put_back(told, step, made.sandbox)
            removed = self._removed() if index or told.regrade is None else None
            goes_on = index + 1 < len(told.task.steps)
            keeps = goes_on and step.verifier.keeps_processes
            rewards = await verify(
                told, step, made, env, streams, outcome.remarks, removed=removed, keeps_processes=keeps
            )
        if goes_on:
            with faults("environment_lost", "it was cleaned for the next step", by_agent=True):
                await forget(made, told.task.steps[index + 1].agent.user)
                if not keeps:
                    await made.start_entrypoint()
        return rewards

    def _removed(self) -> list[str]:
        return [self._agent.mount] if isinstance(self._agent, Oracle) else []

    def _is_over(self, index: int) -> bool:
        """Return whether the agent's sandbox is no longer needed."""
        return index + 1 == len(self._told.task.steps) and self._told.job.environment.preserve_env == "never"

    def _made_there(self) -> Made:
        assert self._made is not None
        return self._made

    # ---- teardown

    async def _tear_down(self, *, cancelled: bool) -> None:
        if self._address is not None:
            await self._address.close()
        if self._made is not None and not cancelled and self._is_preserved():
            self._told.progress("keeping its sandbox")
            state = self._told.images.state
            self.outcome.preserved, remarks = await preserve(self._made.sandbox, self._workdir, state)
            self.outcome.remarks += remarks
        await self._destroy()

    def _is_preserved(self) -> bool:
        policy = self._told.job.environment.preserve_env
        if policy != "on_failure":
            return policy == "always"
        counted = count(self._told, self.outcome)
        reward = single(counted.rewards)
        return counted.error is not None or (reward is not None and reward < PASS)

    async def _destroy(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            await end(made.sandbox, self.outcome)

    @contextmanager
    def _streams(self, step: Step | None, phase: str) -> Generator[Streams]:
        told = self._told
        directory = told.files / phase if step is None else told.directory(step, phase)
        streams = Streams(directory, phase, told.live, told.masks)
        try:
            yield streams
        finally:
            self.outcome.remarks += streams.close()
