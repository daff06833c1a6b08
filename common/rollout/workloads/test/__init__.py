"""The workload `test`: runs any test suite on the workers."""
