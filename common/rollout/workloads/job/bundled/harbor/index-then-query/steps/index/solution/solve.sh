#!/bin/bash
python3 - <<'PYTHON'
import collections, json, pathlib

index = collections.defaultdict(set)
for path in pathlib.Path("/app/documents").glob("*.txt"):
    for word in path.read_text().split():
        index[word].add(path.stem)
pathlib.Path("/app/index.json").write_text(json.dumps({word: sorted(names) for word, names in index.items()}))
PYTHON
