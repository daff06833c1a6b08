#!/bin/bash
cat > /app/settings.json <<'JSON'
{"name": "café \"ünder\" 東京", "retries": 3, "verbose": false, "hosts": []}
JSON
