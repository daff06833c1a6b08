"""The workload `map`: a Python function over many inputs."""
