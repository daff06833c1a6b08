"""Functions over many rows, from Python: what `import rollout` offers."""
