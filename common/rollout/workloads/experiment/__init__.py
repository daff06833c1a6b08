"""The workload `experiment`: variants of an agent at tasks, with facts and evidence that say which is better."""
