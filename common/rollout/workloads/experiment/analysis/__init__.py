"""The analysis of a run's facts: SQL views over them, comparisons of its variants, and a report as one HTML page."""
