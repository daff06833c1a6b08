"""The coordinator: a pure core that decides, and a thin shell that commits, then sends."""

import os

# gRPC reads both when it is imported. What it would print, the statuses say too, and its lines are not JSON.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Its servers poll from the thread that waits for completions, as they did before 1.60, and not from a pool of threads
# that wake each other: a fifth less processor time for a beat, a tenth for an item.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
