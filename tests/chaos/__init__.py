"""The fault campaign: real processes, random faults, an independent checker."""
