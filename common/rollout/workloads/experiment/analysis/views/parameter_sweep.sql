-- Variants with their bindings, the best first; of equally good ones the cheapest.
CREATE OR REPLACE VIEW best_config AS
WITH bound AS (
    SELECT variant_id, json_group_object(binding_name, binding_value) AS bindings
    FROM (SELECT DISTINCT variant_id, binding_name, binding_value FROM variant_snapshots ORDER BY ALL)
    GROUP BY variant_id
)
SELECT
    rank() OVER (ORDER BY s.mean_score * d.direction DESC NULLS LAST, s.mean_cost_usd NULLS LAST) AS place,
    s.variant_id,
    b.bindings,
    s.mean_score,
    s.pass_rate,
    s.scored,
    s.mean_cost_usd
FROM score_direction d, variant_summary s
LEFT JOIN bound b ON b.variant_id = s.variant_id
ORDER BY place, s.variant_id;

-- The mean over all trials with one value of one binding.
CREATE OR REPLACE VIEW binding_effects AS
SELECT
    b.binding_name,
    b.binding_text,
    count(DISTINCT b.variant_id) AS variants,
    count(t.pass) AS scored,
    avg(t.value) AS mean_score,
    avg(t.pass) AS pass_rate,
    avg(t.cost_usd) AS mean_cost_usd
FROM (SELECT DISTINCT variant_id, binding_name, binding_text FROM variant_snapshots) b
JOIN trials t ON t.variant_id = b.variant_id
GROUP BY b.binding_name, b.binding_text
ORDER BY b.binding_name, b.binding_text;
