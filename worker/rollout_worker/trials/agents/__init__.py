"""Agents: built in, of coding command lines, and of plugins."""
