"""`rollout test`. What is needed for `rollout --help` is here, and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "test": Command(
        "Run any test suite, spread over the workers: retries, flaky tests, JUnit, durations from run to run.",
        "rollout.workloads.test.commands.test:app",
    ),
}
