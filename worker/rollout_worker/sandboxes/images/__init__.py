"""What a sandbox begins with: from a task's Dockerfile or image to a root that a provider can start from."""
