"""The workload `test`: any test suite, spread over the workers."""
