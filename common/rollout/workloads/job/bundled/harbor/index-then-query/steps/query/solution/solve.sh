#!/bin/bash
python3 - > /app/answer.txt <<'PYTHON'
import json

with open("/app/index.json") as file:
    index = json.load(file)
print("\n".join(sorted(set(index["water"]) & set(index["salt"]))))
PYTHON
