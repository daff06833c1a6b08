-- Views of paired designs: each variant beside the baseline, task by task.

-- A row for each task and variant that is not the baseline, where both have scored trials. Differences are the
-- variant's less the baseline's; each task counts once, however often it was tried.
CREATE OR REPLACE VIEW paired_differences AS
SELECT
    v.task_id,
    v.variant_id,
    b.variant_id AS baseline_id,
    b.mean_score AS baseline_score,
    v.mean_score AS variant_score,
    v.mean_score - b.mean_score AS difference,
    v.pass_rate - b.pass_rate AS pass_difference,
    v.mean_cost_usd - b.mean_cost_usd AS cost_difference
FROM task_variant_matrix v
JOIN pairs p ON p.variant_id = v.variant_id
JOIN task_variant_matrix b ON b.task_id = v.task_id AND b.variant_id = p.baseline_id
WHERE v.mean_score IS NOT NULL AND b.mean_score IS NOT NULL;

CREATE OR REPLACE VIEW win_loss_tie AS
SELECT
    variant_id,
    baseline_id,
    count(*) AS tasks,
    count(*) FILTER (difference * direction > 0) AS wins,
    count(*) FILTER (difference * direction < 0) AS losses,
    count(*) FILTER (difference = 0) AS ties,
    avg(difference) AS mean_difference,
    avg(pass_difference) AS mean_pass_difference
FROM paired_differences, score_direction
GROUP BY variant_id, baseline_id
ORDER BY variant_id;
