"""The commands that belong to no workload. What is needed for `rollout --help` is here, and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "plan": Command(
        "Say what a configuration file would do, after checking all of it: keys, values, contradictions, input rows.",
        "rollout.cli.commands.plan:plan",
    ),
    "run": Command("Runs: list, show, watch and command them.", "rollout.cli.commands.runs:app"),
    "item": Command("Single rows of a run.", "rollout.cli.commands.item:app"),
    "logs": Command(
        "What processes of a run printed: functions of `map`, engines, executors; of all workers, the newest last.",
        "rollout.cli.commands.logs:logs",
    ),
    "events": Command(
        "What happened, in sentences: workers came, failed and left; who leads; steals; runs began, paused and ended.",
        "rollout.cli.commands.events:events",
    ),
    "ui": Command("A live page of the cluster, in a browser.", "rollout.ui.commands:ui"),
    "report": Command("Write a run as one HTML file.", "rollout.ui.commands:report"),
    "workers": Command("The workers of the cluster and what they do.", "rollout.cli.commands.workers:app"),
    "doctor": Command(
        "Check this machine and its cluster: each line is ok, a warning or a fault, with what to do about it.",
        "rollout.cli.commands.doctor:doctor",
    ),
    "join": Command("Enrol this host as an operator's.", "rollout.cli.commands.join:join"),
    "context": Command("Clusters by name: list, use, add and remove them.", "rollout.cli.commands.context:app"),
    "cloud": Command("The account of a cloud provider that [cloud] names.", "rollout.cli.commands.cloud:app"),
    "model": Command("Models to try things with.", "rollout.cli.commands.model:app"),
}
"""As a person comes to need them."""
