"""Child processes: starts, ends and restarts them, and exchanges messages with them."""
