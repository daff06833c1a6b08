"""The live page (`rollout ui`), and a run as one file (`rollout report`)."""
