"""`rollout job` and `rollout task`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "job": Command(
        "Evaluate agents at tasks, in sandboxes, verified and resumable.",
        "rollout.workloads.job.commands.job:app",
    ),
    "task": Command("Make, check and test tasks for agents.", "rollout.workloads.job.commands.task:app"),
}
