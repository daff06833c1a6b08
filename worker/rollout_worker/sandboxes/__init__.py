"""Isolated places to run commands in: one port, one provider per file, and a suite that every provider must pass.

Jobs, experiments, test offload and reinforcement learning environments use the same `port.Provider`.
"""
