"""Worker: a daemon that does only I/O, and supervised child processes that run plugins, engines and executors."""

import os

# gRPC reads it when it is imported. What it would print, the statuses say too, and its lines are not JSON.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
