"""Batch inference over JSONL. `workload` is where it meets the rest."""
