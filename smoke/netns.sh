#!/usr/bin/env bash
# Every node in a network namespace of its own; links are cut and healed while rows run. Linux, as root; else skipped.
# BIN: where python of an environment with rollout is (default .venv/bin).
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${BIN:-.venv/bin}/python" smoke/netns.py "$@"
