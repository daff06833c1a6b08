"""`rollout serve`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "serve": Command(
        "Serve an OpenAI-compatible API with the engines of a cluster: streaming, replay, hot switch.",
        "rollout.workloads.serve.commands.serve:app",
    ),
}
