"""Runs tests of users: processes that hold a warm test framework, and what becomes of a test that ends its process."""
