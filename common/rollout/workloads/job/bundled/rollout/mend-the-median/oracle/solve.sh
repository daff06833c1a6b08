#!/bin/bash
cat > /app/median <<'PYTHON'
#!/usr/bin/env python3
import sys

with open(sys.argv[1]) as file:
    numbers = sorted(float(word) for word in file.read().split())
middle = len(numbers) // 2
if not numbers:
    print("none")
elif len(numbers) % 2:
    print(f"{numbers[middle]:g}")
else:
    print(f"{(numbers[middle - 1] + numbers[middle]) / 2:g}")
PYTHON
