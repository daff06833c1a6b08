"""Any Python function over many inputs."""
