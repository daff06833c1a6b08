"""`rollout infer batch`: the standard command; and `rollout infer retry`."""

from rollout.cli.commands.standard import standard_commands
from rollout.workloads.infer.commands import COMMANDS
from rollout.workloads.infer.commands.retry import retry
from rollout.workloads.registered import load

app = standard_commands(load("infer"), COMMANDS["infer"].help)
app.command("retry")(retry)
