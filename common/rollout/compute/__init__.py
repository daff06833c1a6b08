"""What a host offers, and the notice that it is about to be taken away."""
