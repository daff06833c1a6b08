"""A host's resources, and the notice that it is about to be taken away."""
