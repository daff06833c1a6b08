#!/bin/bash
# 1 if both are right, half for one of them; a variable of the solution must not be seen here.
reward=0
written=$(cat /app/greeting.txt)
[ "$written" = "$EXPECTED" ] && reward=0.5
[ "$(GREETING=ahoy bash /app/greet 'mia and ben')" = "ahoy, mia and ben" ] && reward=$([ "$reward" = 0.5 ] && echo 1 || echo 0.5)
[ -z "$WHO" ] || reward=-1
echo "$reward" > /logs/verifier/reward.txt
