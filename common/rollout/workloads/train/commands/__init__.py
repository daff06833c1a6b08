"""`rollout train` and `rollout snapshot`. This module has what `rollout --help` needs and imports nothing heavy."""

from rollout.workloads.registered import Command

COMMANDS = {
    "train": Command(
        "Train a model: SFT, reward models, DPO, IPO and KTO, with snapshots that resume to the byte.",
        "rollout.workloads.train.commands.train:app",
    ),
    "snapshot": Command(
        "List, show, export and delete snapshots of training runs.",
        "rollout.workloads.train.commands.snapshot:app",
    ),
}
