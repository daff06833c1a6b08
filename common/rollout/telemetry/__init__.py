"""Traces of items, and figures of this host that every daemon exposes."""
