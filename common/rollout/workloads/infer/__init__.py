"""Batch inference over JSONL. `workload` connects this package to the rest."""
