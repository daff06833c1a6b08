"""Agents: bash of the job, a loop of our own, coding command lines, and classes of other packages."""

from rollout_worker.trials.agents.make import make_agent

__all__ = ["make_agent"]
