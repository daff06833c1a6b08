"""`rollout infer batch`: the standard command."""

from rollout.cli.commands.standard import standard_commands
from rollout.workloads.infer.commands import COMMANDS
from rollout.workloads.registered import load

app = standard_commands(load("infer"), COMMANDS["infer"].help)
