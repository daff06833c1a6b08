"""Verification in a sandbox that no agent has used, with only the artifacts of the agent."""

from __future__ import annotations

import asyncio

from rollout.cloud.shielded import to_the_end
from rollout.workloads.job.record import ARTIFACTS
from rollout.workloads.job.rewards import Rewards
from rollout.workloads.job.task import Environment, Step

from rollout_worker.sandboxes.port import Sandbox
from rollout_worker.trials.ending import end
from rollout_worker.trials.faults import faults
from rollout_worker.trials.gathering import put_artifacts, read_manifest
from rollout_worker.trials.health import until_healthy
from rollout_worker.trials.making import Wish, make_sandbox
from rollout_worker.trials.outcome import Outcome
from rollout_worker.trials.port import TrialFault
from rollout_worker.trials.streams import Streams
from rollout_worker.trials.told import Told
from rollout_worker.trials.verifying import verify


async def verify_apart(
    told: Told,
    index: int,
    environment: Environment,
    outcome: Outcome,
    streams: Streams,
    *,
    room_s: float | None,
) -> Rewards:
    """Verify the step `index`. `room_s` limits the wait for room while the trial has another sandbox. Raises
    TrialFault."""
    step = told.task.steps[index]
    wish = Wish(
        environment,
        [step.verifier.network],
        told.environs.verifier_sandboxes[index],
        [step.verifier.user],
        told.timeouts(step).build_s,
        "verification",
    )
    made = await make_sandbox(told, wish, outcome.times, room_s=room_s)
    try:
        outcome.remarks += made.remarks
        if environment.healthcheck is not None:
            await until_healthy(environment.healthcheck, made, streams)
        await put_back(told, step, made.sandbox)
        env = told.environs.verifiers[index]
        return await verify(told, step, made, env, streams, outcome.remarks, removed=None)
    finally:
        await to_the_end(end(made.sandbox, outcome))


async def put_back(told: Told, step: Step, sandbox: Sandbox) -> None:
    """Put the artifacts of this trial, or of the earlier one that is regraded, where they were in its sandbox.

    Raises TrialFault.
    """
    directory = told.directory(step, ARTIFACTS)
    if told.regrade is not None:
        directory = told.regrade / directory.relative_to(told.files)
    brought = await asyncio.to_thread(read_manifest, directory)
    if not brought and told.regrade is not None:  # what was declared and never made, the tests are to see
        raise TrialFault(
            "task_invalid",
            "the earlier trial kept no artifacts, so there is nothing to verify anew: declare those that the tests "
            "look at (artifacts = [...] in task.toml, or artifacts: in the job file) and run the trial again",
        )
    with faults("verifier_tests_copy_failed", "artifacts were copied", by_agent=True):
        await put_artifacts(sandbox, brought, directory)
