"""Child processes: how they start, end, are started again, and what they say to the process that started them."""
