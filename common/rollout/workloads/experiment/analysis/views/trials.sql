-- The facts of the runs that the database was opened with. The tables facts_* hold them as they were written.

-- A row for each slot of every run. `pass` is 1 or 0, and `value` the score; of a trial that has neither by the agent's
-- own doing they are 0, since it would leave the denominator otherwise (no value where the lowest score is best). Both
-- are null where a fault of the infrastructure, pruning or a cancellation left nothing to judge.
CREATE OR REPLACE VIEW judged_trials AS
WITH blamed AS (
    SELECT t.*, r.thresholds.pass AS threshold, r.selected, d.direction,
        t.status IN ('completed', 'failed') AND (
            t.classification IS NULL
            OR e.classification IS NOT NULL
            OR starts_with(t.classification, 'agent_result_')
            OR starts_with(t.classification, 'grade_')
        ) AS by_agent
    FROM facts_trials t
    JOIN facts_runs r ON r.run_id = t.run_id
    CROSS JOIN score_direction d
    LEFT JOIN agent_errors e ON e.classification = t.classification
)
SELECT * EXCLUDE (threshold, direction, by_agent),
    CASE WHEN score IS NOT NULL THEN score WHEN by_agent AND direction > 0 THEN 0 END AS value,
    CASE
        WHEN passed IS NOT NULL THEN passed::DOUBLE
        WHEN score IS NOT NULL THEN ((score - coalesce(threshold, 1)) * direction >= 0)::DOUBLE
        WHEN by_agent THEN 0
    END AS pass
FROM blamed;

CREATE OR REPLACE VIEW trials AS SELECT * EXCLUDE (selected) FROM judged_trials WHERE selected;
CREATE OR REPLACE VIEW metrics_long AS
SELECT m.* FROM facts_metrics_long m JOIN facts_runs r ON r.run_id = m.run_id WHERE r.selected;
CREATE OR REPLACE VIEW events AS
SELECT e.* FROM facts_events e JOIN facts_runs r ON r.run_id = e.run_id WHERE r.selected;
CREATE OR REPLACE VIEW variant_snapshots AS
SELECT s.* FROM facts_variant_snapshots s JOIN facts_runs r ON r.run_id = s.run_id WHERE r.selected;
