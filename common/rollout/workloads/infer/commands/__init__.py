"""`rollout infer`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "infer": Command(
        "Run batch inference over JSONL, CSV or parquet: resumable, every row exactly once, in input order.",
        "rollout.workloads.infer.commands.infer:app",
    ),
}
