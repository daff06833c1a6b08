#!/bin/bash
python3 - > /app/answer.txt <<'PYTHON'
import urllib.request

try:
    with urllib.request.urlopen("http://forbidden.invalid/", timeout=10) as page:
        page.read()
    print("reached")
except OSError:
    print("refused")
PYTHON
