"""The workload `experiment`: runs variants of an agent on tasks, and reports with evidence which is better."""
