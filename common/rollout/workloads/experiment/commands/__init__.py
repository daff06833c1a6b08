"""`rollout experiment`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "experiment": Command(
        "Compare variants of an agent: facts, evidence and analysis.",
        "rollout.workloads.experiment.commands.experiment:app",
    ),
}
