"""Checks of `rollout cloud doctor`, one file per subject."""
