#!/bin/bash
# The reward is 1 if the summary is right in every part, else 0.
python3 - <<'PYTHON' | tee /logs/verifier/why.txt
import json

EXPECTED = {
    "requests": 7,
    "by_status": {"200": 3, "302": 1, "404": 2, "503": 1},
    "bytes": 3217,
    "busiest": "192.0.2.7",
}
try:
    with open("/app/summary.json") as file:
        found = json.load(file)
except (OSError, ValueError) as error:
    found = None
    print(f"no summary: {error}")
if found is not None and found != EXPECTED:
    print(f"expected {EXPECTED}, found {found}")
with open("/logs/verifier/reward.txt", "w") as reward:
    reward.write("1" if found == EXPECTED else "0")
PYTHON
