"""`rollout map`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "map": Command(
        "Call a Python function with each row of JSON: resumable, every row exactly once, in input order.",
        "rollout.workloads.map.commands.map:app",
    ),
}
