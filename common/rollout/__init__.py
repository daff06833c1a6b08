"""Rollout's shared package: values, configuration, wire, stores, the client and the `rollout` command."""
