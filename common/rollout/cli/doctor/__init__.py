"""Checks of `rollout doctor`, one file per subject."""
