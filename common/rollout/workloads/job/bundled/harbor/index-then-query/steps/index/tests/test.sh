#!/bin/bash
python3 - <<'PYTHON'
import json

expected = {
    "egg": ["pasta"],
    "flour": ["bread", "pasta"],
    "leaves": ["tea"],
    "salt": ["bread", "pasta"],
    "water": ["bread", "pasta", "tea"],
    "yeast": ["bread"],
}
try:
    with open("/app/index.json") as file:
        right = json.load(file) == expected
except (OSError, ValueError) as error:
    print(error)
    right = False
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": float(right)}, file)
PYTHON
