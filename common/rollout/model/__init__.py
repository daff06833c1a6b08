"""Frozen values that all other packages use. No clock, no randomness, no I/O."""
