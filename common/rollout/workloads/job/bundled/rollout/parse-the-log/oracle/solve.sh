#!/bin/bash
python3 - <<'PYTHON'
import collections, json, re

form = re.compile(r'(\S+) \[[^\]]+\] "[^"]*" (\d{3}) (\d+)')
with open("/app/access.txt") as log:
    found = [match.groups() for line in log if (match := form.fullmatch(line.strip()))]
summary = {
    "requests": len(found),
    "by_status": dict(collections.Counter(status for _, status, _ in found)),
    "bytes": sum(int(size) for _, _, size in found),
    "busiest": collections.Counter(address for address, _, _ in found).most_common(1)[0][0],
}
with open("/app/summary.json", "w") as out:
    json.dump(summary, out)
PYTHON
