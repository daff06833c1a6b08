"""`rollout map`. What is needed for `rollout --help` is here, and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "map": Command(
        "Any Python function over many rows of JSON: resumable, every row exactly once, in input order.",
        "rollout.workloads.map.commands.map:app",
    ),
}
