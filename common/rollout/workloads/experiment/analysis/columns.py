"""The columns of the facts, as DuckDB reads them: named and typed, never guessed from the first rows."""

from __future__ import annotations

from collections.abc import Mapping

Columns = dict[str, str]
"""Maps a name to its DuckDB type."""

_KEY: Columns = {
    "run_id": "VARCHAR",
    "schedule_index": "BIGINT",
    "slot_commit_id": "VARCHAR",
    "attempt": "INTEGER",
    "row_sequence": "BIGINT",
}
_TRIAL: Columns = {"trial_id": "VARCHAR", "variant_id": "VARCHAR", "task_id": "VARCHAR"}

MANIFEST = "run_manifest.json"
MANIFEST_COLUMNS: Columns = {
    "run_id": "VARCHAR",
    "experiment_id": "VARCHAR",
    "name": "VARCHAR",
    "created_at": "VARCHAR",
    "resolved_digest": "VARCHAR",
    "rollout_version": "VARCHAR",
    "design": "STRUCT(comparison VARCHAR, replications BIGINT, seed BIGINT)",
    "baseline": "VARCHAR",
    "tasks": "BIGINT",
    "total_slots": "BIGINT",
    "state_policy": "VARCHAR",
    "primary_metric": "STRUCT(name VARCHAR, direction VARCHAR)",
    "thresholds": "STRUCT(pass DOUBLE, non_inferiority_margin DOUBLE)",
    "graded": "BOOLEAN",
    "forked_from": "STRUCT(run_id VARCHAR, slots BIGINT)",
}
FACTS: Mapping[str, Columns] = {
    "trials": _KEY
    | _TRIAL
    | {
        "repl_idx": "INTEGER",
        "chain_id": "VARCHAR",
        "baseline": "BOOLEAN",
        "status": "VARCHAR",
        "outcome": "VARCHAR",
        "classification": "VARCHAR",
        "exit_status": "INTEGER",
        "grade_exit_status": "INTEGER",
        "score": "DOUBLE",
        "passed": "BOOLEAN",
        "objective_name": "VARCHAR",
        "objective_value": "DOUBLE",
        "answer_sha256": "VARCHAR",
        "image": "VARCHAR",
        "tokens_in": "BIGINT",
        "tokens_out": "BIGINT",
        "cost_usd": "DOUBLE",
        "error_message": "VARCHAR",
        "worker_id": "VARCHAR",
        "started_at": "VARCHAR",
        "ended_at": "VARCHAR",
        "duration_ms": "DOUBLE",
    },
    "metrics_long": _KEY
    | _TRIAL
    | {"repl_idx": "INTEGER", "metric_name": "VARCHAR", "metric_value": "DOUBLE", "source": "VARCHAR"},
    "events": _KEY | _TRIAL | {"event_type": "VARCHAR", "payload": "JSON"},
    "variant_snapshots": _KEY
    | {
        "trial_id": "VARCHAR",
        "variant_id": "VARCHAR",
        "binding_name": "VARCHAR",
        "binding_value": "JSON",
        "binding_text": "VARCHAR",
    },
}
"""Columns by name of the file without `.jsonl`."""
EVIDENCE_COLUMNS: Columns = {
    "ids": "STRUCT(run_id VARCHAR, trial_id VARCHAR)",
    "evidence": "JSON",
    "paths": "STRUCT(trial_dir VARCHAR)",
}
"""Columns of evidence_records.jsonl that the report links to."""
