"""The coordinator: a pure core that decides, and a thin shell that commits, then sends."""
