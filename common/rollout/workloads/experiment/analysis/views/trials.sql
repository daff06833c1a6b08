-- The facts of the runs that the database was opened with. The tables facts_* hold them as they were written.

-- A row for each slot of every run. `value` is the score and `pass` 1 or 0; both are null where there is nothing to judge:
-- after a fault of the infrastructure, pruning or a cancellation. A trial that failed by its agent's own doing has not
-- passed, and scores 0 where more is better.
CREATE OR REPLACE VIEW judged_trials AS
SELECT t.*, t.score AS value, t.passed::DOUBLE AS pass, r.selected
FROM facts_trials t
JOIN facts_runs r ON r.run_id = t.run_id;

CREATE OR REPLACE VIEW trials AS SELECT * EXCLUDE (selected) FROM judged_trials
WHERE selected AND variant_id IN (FROM shown_variants);
CREATE OR REPLACE VIEW metrics_long AS
SELECT m.* FROM facts_metrics_long m JOIN facts_runs r ON r.run_id = m.run_id
WHERE r.selected AND m.variant_id IN (FROM shown_variants);
CREATE OR REPLACE VIEW events AS
SELECT e.* FROM facts_events e JOIN facts_runs r ON r.run_id = e.run_id
WHERE r.selected AND e.variant_id IN (FROM shown_variants);
CREATE OR REPLACE VIEW variant_snapshots AS
SELECT s.* FROM facts_variant_snapshots s JOIN facts_runs r ON r.run_id = s.run_id
WHERE r.selected AND s.variant_id IN (FROM shown_variants);
