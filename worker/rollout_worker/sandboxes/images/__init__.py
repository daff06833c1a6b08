"""Preparation of images: from a task's Dockerfile or image to a root that a provider can start from."""
