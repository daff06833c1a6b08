"""Trials of agents on tasks: phases, agents, verification."""
