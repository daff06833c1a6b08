"""Agents: the job's bash, a loop of our own, coding CLIs, and classes of other packages."""

from rollout_worker.trials.agents.make import make_agent

__all__ = ["make_agent"]
