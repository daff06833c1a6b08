"""Frozen values that every other package speaks in. No clock, no randomness, no I/O."""
