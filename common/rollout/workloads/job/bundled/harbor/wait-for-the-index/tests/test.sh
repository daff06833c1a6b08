#!/bin/bash
# 230 is in the second part, and 229, which a string would put there too, in the third.
reward=0
[ "$(wc -l < /app/index)" -eq 6 ] && [ "$(cat /app/largest.txt)" = 230 ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
