"""Commands that belong to no workload. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "plan": Command(
        "Check a configuration file and its input, and show what it would do.",
        "rollout.cli.commands.plan:plan",
    ),
    "run": Command("List, show, watch and command runs.", "rollout.cli.commands.runs:app"),
    "item": Command("Show or cancel a row of a run.", "rollout.cli.commands.item:app"),
    "logs": Command(
        "Print the output of a run's processes (functions of `map`, engines, executors) on all workers.",
        "rollout.cli.commands.logs:logs",
    ),
    "events": Command(
        "List events: workers that join, fail and leave, leaders, steals, states of runs, commands.",
        "rollout.cli.commands.events:events",
    ),
    "ui": Command("Serve a live page of the cluster.", "rollout.ui.commands:ui"),
    "report": Command("Write a run as one self-contained HTML file.", "rollout.ui.commands:report"),
    "workers": Command("List the workers of the cluster and their work.", "rollout.cli.commands.workers:app"),
    "doctor": Command(
        "Check this machine and its cluster; each warning or fault comes with a remedy.",
        "rollout.cli.commands.doctor:doctor",
    ),
    "join": Command("Enrol this host as an operator's.", "rollout.cli.commands.join:join"),
    "context": Command("Manage names of clusters.", "rollout.cli.commands.context:app"),
    "cloud": Command("Check the account of a cloud provider.", "rollout.cli.commands.cloud:app"),
    "model": Command("Make models for experiments.", "rollout.cli.commands.model:app"),
}
"""Commands in the order in which a user comes to need them."""
