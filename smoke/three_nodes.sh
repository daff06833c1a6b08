#!/usr/bin/env bash
# One coordinator and three workers on loopback: plugins, dispatch, a steal, a worker and the coordinator killed.
# BIN: where python of an environment with rollout is (default .venv/bin).
set -euo pipefail
cd "$(dirname "$0")/.."
command -v "${CC:-cc}" >/dev/null || { echo "skipped: no C compiler (cc) for the cdylib sample" >&2; exit 0; }
exec "${BIN:-.venv/bin}/python" smoke/three_nodes.py "$@"
