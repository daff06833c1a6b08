"""`rollout test`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "test": Command(
        "Run any test suite on many workers, with retries, flaky tests, JUnit and a history of durations.",
        "rollout.workloads.test.commands.test:app",
    ),
}
