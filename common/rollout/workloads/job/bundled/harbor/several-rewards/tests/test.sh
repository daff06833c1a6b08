#!/bin/bash
# The trial's reward is the mean of the two.
work=$(mktemp -d)
printf 'b\na\nb\n\n-x\na\n\nc d\n' > "$work/lines"
if [ "$(bash /app/tally "$work/lines")" = $'b\na\n\n-x\nc d' ]; then right=1; else right=0; fi
# With no directory of programs to look in, only what bash does itself works.
if [ "$(PATH=/nowhere /bin/bash /app/tally "$work/lines" 2> /dev/null)" = $'b\na\n\n-x\nc d' ]; then fast=1; else fast=0; fi
echo "{\"right\": $right, \"fast\": $fast}" > /logs/verifier/reward.json
