#!/bin/bash
# Two rewards: what was found, and the one called reward, of which the trial's mean is made.
if [ "$(cat /app/answer.txt)" = $'bread\npasta' ]; then right=1; else right=0; fi
echo "{\"reward\": $right, \"found\": $right}" > /logs/verifier/reward.json
