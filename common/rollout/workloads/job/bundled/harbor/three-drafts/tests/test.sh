#!/bin/bash
# Of all steps; how many lines there shall be lies beside it, in the step's own directory.
expected=$(for n in $(seq "$(cat /tests/lines)"); do echo "draft $n"; done)
if [ "$(cat /app/draft.txt)" = "$expected" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
