"""Isolated places to run commands in: one port, a provider a file, and a suite that every provider must pass.

Jobs, experiments, test offload and environments of reinforcement learning use the same `port.Provider`.
"""
