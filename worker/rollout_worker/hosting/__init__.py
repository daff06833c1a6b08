"""Plugins in three modes (python, sidecar, cdylib), each in its own process."""
