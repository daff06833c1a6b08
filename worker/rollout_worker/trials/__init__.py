"""Trials of agents at tasks: phases, agents, verification."""
