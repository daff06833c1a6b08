#!/bin/bash
# The reward is the part of the cases that are right; a program that cannot be read at all counts 0.
work=$(mktemp -d)
right=0
check() {
  printf '%s' "$2" > "$work/numbers"
  found=$(python3 /app/median "$work/numbers" 2>&1)
  if [ "$found" = "$1" ]; then right=$((right + 1)); else echo "expected $1, found $found"; fi
}
check 3 $'1\n3\n5\n'
check 10 $'9\n10\n11\n'
check 4.5 $'4\n5\n'
check none ''
case $right in
  4) echo 1 ;;
  *) echo "0.$((right * 25))" ;;
esac > /logs/verifier/reward.txt
