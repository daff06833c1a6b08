"""The coordinator: a pure core that decides, and a thin shell that commits, then sends."""

import os

# gRPC reads it when it is imported. What it would print, the statuses say too, and its lines are not JSON.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
