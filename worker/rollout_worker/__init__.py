"""The worker: a daemon that does I/O only, and supervised child processes that run plugins, engines and executors."""
