"""Plugins in their three modes (python, sidecar, cdylib), each in a process of its own."""
