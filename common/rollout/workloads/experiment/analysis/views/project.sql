-- Views over all runs of a project, those that the database was opened with.

CREATE OR REPLACE VIEW all_runs AS
SELECT
    r.run_id,
    r.experiment_id,
    r.name,
    r.created_at,
    r.resolved_digest,
    r.design.comparison AS comparison,
    r.baseline,
    r.total_slots,
    count(t.trial_id) AS committed,
    count(t.pass) AS scored,
    avg(t.pass) AS pass_rate,
    avg(t.value) AS mean_score,
    sum(t.cost_usd) AS cost_usd,
    r.forked_from.run_id AS forked_from
FROM facts_runs r
LEFT JOIN judged_trials t ON t.run_id = r.run_id
GROUP BY ALL
ORDER BY r.created_at, r.run_id;

CREATE OR REPLACE VIEW all_trials AS
SELECT r.experiment_id, r.name, r.created_at, t.* EXCLUDE (selected), r.forked_from.run_id AS forked_from
FROM judged_trials t
JOIN facts_runs r ON r.run_id = t.run_id
ORDER BY r.created_at, t.run_id, t.schedule_index;

-- A row for each run and variant, with the change since the run before of the same experiment and variant. A fork
-- (`forked_from`: of which run) has some trials of another run.
CREATE OR REPLACE VIEW pass_rate_trend AS
WITH rates AS (
    SELECT
        experiment_id,
        variant_id,
        run_id,
        name,
        created_at,
        count(pass) AS scored,
        count(DISTINCT task_id) AS tasks,
        avg(pass) AS pass_rate,
        avg(value) AS mean_score,
        sum(cost_usd) AS cost_usd,
        forked_from
    FROM all_trials
    GROUP BY ALL
)
SELECT *, pass_rate - lag(pass_rate) OVER (
    PARTITION BY experiment_id, variant_id ORDER BY created_at, run_id
) AS change
FROM rates
ORDER BY experiment_id, variant_id, created_at, run_id;

CREATE OR REPLACE VIEW trend AS SELECT * FROM pass_rate_trend;
