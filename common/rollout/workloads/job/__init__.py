"""Agent evaluation: tasks, agents, trials and their results. What is here starts no process but git and `uv`."""
