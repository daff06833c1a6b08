"""`rollout job` and `rollout task`. What is needed for `rollout --help` is here, and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "job": Command(
        "Evaluate agents: each agent at each task, as often as you like, in sandboxes, verified, resumable.",
        "rollout.workloads.job.commands.job:app",
    ),
    "task": Command(
        "Tasks of agent evaluation: make, check and try task directories.", "rollout.workloads.job.commands.task:app"
    ),
}
