#!/bin/bash
# A fifth for each line that is right: one of them is right from the beginning.
right=0
number=0
for expected in ada,2026-02-28 bob,2025-04-03 cyd,1999-12-31 dan,2024-02-29 eve,2026-07-04; do
  number=$((number + 1))
  found=$(sed -n "${number}p" /app/dates.csv)
  if [ "$found" = "$expected" ]; then right=$((right + 1)); else echo "line $number: $found, expected $expected"; fi
done
echo "0.$((right * 2))" | sed 's/^0.10$/1/' > /logs/verifier/reward.txt
