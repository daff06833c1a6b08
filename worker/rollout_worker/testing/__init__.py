"""Runs users' tests: processes that hold a warm test framework, and what happens to a test that ends its process."""
