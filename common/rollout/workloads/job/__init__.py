"""Agent evaluation: tasks, agents, trials and their results. This package starts no process except git and `uv`."""
