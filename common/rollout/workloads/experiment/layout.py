"""File names in the directory of a run and of a trial, relative to the run's directory."""

MANIFEST = "manifest.json"
RESOLVED = "resolved_experiment.json"
DIGEST = "resolved_experiment.digest"
CONTROL = "runtime/run_control.json"
PROGRESS = "runtime/schedule_progress.json"
RUN_MANIFEST = "facts/run_manifest.json"
TRIALS = "facts/trials.jsonl"
METRICS = "facts/metrics_long.jsonl"
EVENTS = "facts/events.jsonl"
SNAPSHOTS = "facts/variant_snapshots.jsonl"
FACTS = (TRIALS, METRICS, EVENTS, SNAPSHOTS)
EVIDENCE = "evidence/evidence_records.jsonl"
PRUNED = "evidence/pruned_records.jsonl"
"""Evidence of trials that were running when their variant was pruned; they have no facts."""
CHAINS = "evidence/task_chain_states.jsonl"
ARTIFACTS = "evidence/artifacts"
PREDICTIONS = "benchmark/predictions.jsonl"
SCORES = "benchmark/scores.jsonl"
SUMMARY = "summary.json"
TRIAL_DIRECTORIES = "trials"
DIRECTORIES = ("runtime", "facts", ARTIFACTS, "benchmark", "analysis", TRIAL_DIRECTORIES)

TRIAL_INPUT = "trial_input.json"
RESULT = "result.json"
GRADE = "grade.json"
RECORD = "trial.json"
"""The trial's record of the job's executor."""


def trial_directory(trial_id: str) -> str:
    return f"{TRIAL_DIRECTORIES}/{trial_id}"


def artifact_path(sha256: str) -> str:
    return f"{ARTIFACTS}/{sha256[:2]}/{sha256}"
