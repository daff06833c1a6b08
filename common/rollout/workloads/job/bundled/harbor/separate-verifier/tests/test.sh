#!/bin/bash
# The orders themselves are no artifact: were they here, the agent's sandbox would be seen.
reward=1
[ "$(cat /app/report.csv)" = $'customer,total\nben,10\nmia,42\nzoe,1' ] || reward=0
[ "$(tr -d ' ' < /app/state.txt)" = 6 ] || reward=0
[ ! -e /app/orders.csv ] || reward=-1
echo "$reward" > /logs/verifier/reward.txt
