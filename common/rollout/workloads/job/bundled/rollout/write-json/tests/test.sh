#!/bin/bash
# The reward is 1 if the object is as it shall be, else 0.
python3 - <<'PYTHON'
import json

try:
    with open("/app/settings.json", encoding="utf-8") as file:
        found = json.load(file)
except (OSError, ValueError) as error:
    found = None
    print(f"no settings: {error}")
expected = {"name": 'café "ünder" 東京', "retries": 3, "verbose": False, "hosts": []}
right = json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"reward": 1 if right else 0}, file)
PYTHON
