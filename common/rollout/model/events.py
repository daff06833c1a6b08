"""Names of the log events that outside scripts rely on."""

from __future__ import annotations

COORDINATOR_READY = "coordinator_ready"
LEASE_ACQUIRED = "lease_acquired"
COORDINATOR_FENCED = "coordinator_fenced"
WORKER_REGISTERED = "worker_registered"
WORKER_HEARTBEAT = "worker_heartbeat"
WORKER_FAILED = "worker_failed"
WORKER_DEREGISTERED = "worker_deregistered"
WORKER_READY = "worker_ready"
WORK_STOLEN = "work_stolen"
RUN_SUBMITTED = "run_submitted"
RUN_COMPLETED = "run_completed"
REST_SKIPPED = "rest_skipped"
