#!/bin/bash
# From the parts as they were: an agent might have changed them.
right=0
for n in 0 1 2 3 4 5 6 7 8 9; do
  expected=$(echo "part $n of ten" | sha256sum | cut -d ' ' -f 1)
  [ "$(cat "/app/sums/part-$n" 2> /dev/null)" = "$expected" ] && right=$((right + 1))
done
case $right in
  10) echo 1 ;;
  *) echo "0.$right" ;;
esac > /logs/verifier/reward.txt
