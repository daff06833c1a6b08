"""`rollout infer`. What is needed for `rollout --help` is here, and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "infer": Command(
        "Run batch inference over JSONL, CSV or parquet: resumable, every row exactly once, in input order.",
        "rollout.workloads.infer.commands.infer:app",
    ),
}
