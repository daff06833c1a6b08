"""What the facts of a run say: SQL views over them, the comparison of its variants, and a report as one HTML page."""
