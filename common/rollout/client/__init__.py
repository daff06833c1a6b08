"""The client of a cluster: submits runs, reads their commit logs, commands them."""

from rollout.client.runs import Page, Runs

__all__ = ["Page", "Runs"]
