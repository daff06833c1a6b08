"""Traces of items, and host metrics that every daemon exposes."""
