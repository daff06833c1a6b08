#!/bin/bash
# The reward is 1 if every case prints what it shall, else 0.
work=$(mktemp -d)
mkdir "$work/plain" "$work/spaces" "$work/empty"
echo "one two three" > "$work/plain/a.txt"
echo "four" > "$work/plain/b.txt"
echo "not counted" > "$work/plain/c.md"
echo "a b" > "$work/spaces/my notes.txt"
echo "c" > "$work/spaces/z.txt"

reward=1
check() {
  got=$(bash /app/count-words "$work/$1" 2> /dev/null)
  if [ "$got" != "$2" ]; then
    echo "$1: expected"; echo "$2"; echo "and got"; echo "$got"
    reward=0
  fi
}
check plain $'3 a.txt\n1 b.txt\n4 total'
check spaces $'2 my notes.txt\n1 z.txt\n3 total'
check empty "0 total"
echo "$reward" > /logs/verifier/reward.txt
