-- Views of one run.

-- A row for each variant. Rates and means are over the `scored` trials.
CREATE OR REPLACE VIEW variant_summary AS
SELECT
    variant_id,
    bool_or(baseline) AS baseline,
    count(*) AS trials,
    count(pass) AS scored,
    count(*) FILTER (status = 'completed') AS completed,
    count(*) FILTER (status = 'failed') AS failed,
    count(*) FILTER (status = 'skipped_pruned') AS pruned,
    count(*) FILTER (status = 'cancelled') AS cancelled,
    count(*) FILTER (status = 'failed' AND pass IS NULL) AS infrastructure,
    count(DISTINCT task_id) AS tasks,
    avg(pass) AS pass_rate,
    avg(value) AS mean_score,
    stddev_samp(value) AS score_stddev,
    sum(cost_usd) AS cost_usd,
    avg(cost_usd) AS mean_cost_usd,
    sum(tokens_in) AS tokens_in,
    sum(tokens_out) AS tokens_out,
    avg(duration_ms) AS mean_duration_ms,
    quantile_cont(duration_ms, 0.5) AS median_duration_ms
FROM trials
GROUP BY variant_id
ORDER BY min(schedule_index), variant_id;

-- A row for each task and variant.
CREATE OR REPLACE VIEW task_variant_matrix AS
SELECT
    task_id,
    variant_id,
    count(*) AS trials,
    count(pass) AS scored,
    avg(pass) AS pass_rate,
    avg(value) AS mean_score,
    min(value) AS lowest,
    max(value) AS highest,
    avg(cost_usd) AS mean_cost_usd
FROM trials
GROUP BY task_id, variant_id
ORDER BY min(schedule_index), task_id, variant_id;

-- A row for each run: how many of its slots are committed.
CREATE OR REPLACE VIEW run_progress AS
SELECT
    r.run_id,
    r.name,
    r.total_slots,
    count(t.trial_id) AS committed,
    count(*) FILTER (t.status = 'completed') AS completed,
    count(*) FILTER (t.status = 'failed') AS failed,
    count(*) FILTER (t.status = 'skipped_pruned') AS pruned,
    count(*) FILTER (t.status = 'cancelled') AS cancelled,
    r.total_slots - count(t.trial_id) AS remaining,
    count(t.trial_id) / nullif(r.total_slots, 0) AS share
FROM facts_runs r
LEFT JOIN facts_trials t ON t.run_id = r.run_id
WHERE r.selected
GROUP BY r.run_id, r.name, r.total_slots, r.created_at
ORDER BY r.created_at;

-- A row for each task, the hardest first, over all variants.
CREATE OR REPLACE VIEW task_difficulty AS
SELECT
    task_id,
    count(pass) AS scored,
    avg(pass) AS pass_rate,
    avg(value) AS mean_score,
    count(DISTINCT variant_id) FILTER (pass = 1) AS variants_that_passed,
    count(DISTINCT variant_id) AS variants
FROM trials
GROUP BY task_id
ORDER BY pass_rate NULLS FIRST, mean_score, task_id;

-- A row for each task and variant whose replications differ, those nearest to even odds first.
CREATE OR REPLACE VIEW task_flakiness AS
SELECT
    task_id,
    variant_id,
    count(pass) AS scored,
    sum(pass)::BIGINT AS passes,
    avg(pass) AS pass_rate,
    stddev_samp(value) AS score_stddev,
    count(DISTINCT answer_sha256) AS answers
FROM trials
WHERE pass IS NOT NULL
GROUP BY task_id, variant_id
HAVING min(pass) < max(pass)
ORDER BY abs(avg(pass) - 0.5), task_id, variant_id;

-- Failures by type and message, with ids, numbers, paths and quoted texts taken out of the message.
CREATE OR REPLACE VIEW failure_clusters AS
WITH failures AS (
    SELECT *,
        trim(regexp_replace(regexp_replace(regexp_replace(regexp_replace(
            coalesce(left(error_message, 2000), ''),
            '"[^"\n]*"|''[^''\n]*''', '<text>', 'g'),
            '(/[^\s/:,;()]+)+/?', '<path>', 'g'),
            '\b(0x)?[0-9a-fA-F]{8,}\b|\b[0-9A-HJKMNP-TV-Z]{26}\b', '<id>', 'g'),
            '\d+(\.\d+)?', '<n>', 'g')) AS pattern
    FROM trials
    WHERE status = 'failed' OR classification IS NOT NULL
)
SELECT
    coalesce(classification, 'unclassified') AS classification,
    pattern,
    count(*) AS trials,
    count(DISTINCT task_id) AS tasks,
    count(pass) AS scored,
    list_sort(list(DISTINCT variant_id)) AS variants,
    arg_min(error_message, schedule_index) AS example,
    arg_min(trial_id, schedule_index) AS example_trial
FROM failures
GROUP BY ALL
ORDER BY trials DESC, classification, pattern;

-- 1 - C(n - c, k) / C(n, k), the mean over the tasks with at least k scored trials (Chen et al. 2021,
-- arXiv:2107.03374, equation 1), and the chance that all k pass, C(c, k) / C(n, k).
CREATE OR REPLACE VIEW pass_at_k AS
WITH counted AS (
    SELECT variant_id, task_id, count(pass) AS n, sum(pass)::BIGINT AS c
    FROM trials
    WHERE pass IS NOT NULL
    GROUP BY variant_id, task_id
)
SELECT
    variant_id,
    k,
    count(*) AS tasks,
    avg(1 - list_product(list_transform(range(k), lambda i: greatest(n - c - i, 0) / (n - i)))) AS pass_at_k,
    avg(list_product(list_transform(range(k), lambda i: greatest(c - i, 0) / (n - i)))) AS all_k_pass
FROM counted, unnest(range(1, least(n, 100) + 1)) AS each(k)
GROUP BY variant_id, k
ORDER BY variant_id, k;
