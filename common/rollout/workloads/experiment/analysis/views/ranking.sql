-- Variants by mean score, and in how many tasks each was best (ties count for all of them).
CREATE OR REPLACE VIEW ranking AS
WITH places AS (
    SELECT m.variant_id, rank() OVER (PARTITION BY m.task_id ORDER BY m.mean_score * d.direction DESC) AS place
    FROM task_variant_matrix m, score_direction d
    WHERE m.mean_score IS NOT NULL
),
placed AS (
    SELECT variant_id, count(*) FILTER (place = 1) AS tasks_best, avg(place) AS mean_place FROM places GROUP BY ALL
)
SELECT
    rank() OVER (ORDER BY s.mean_score * d.direction DESC NULLS LAST) AS place,
    s.variant_id,
    s.mean_score,
    s.pass_rate,
    s.scored,
    p.tasks_best,
    p.mean_place,
    s.mean_cost_usd
FROM score_direction d, variant_summary s
LEFT JOIN placed p ON p.variant_id = s.variant_id
ORDER BY place, s.variant_id;
