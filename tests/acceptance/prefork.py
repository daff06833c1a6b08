"""Runs `rollout` commands, each in a process of its own, without a start of Python for each.

Reads `{"args": [...], "cwd": "...", "env": {...}, "out": "FILE"}` on standard input, a line each; prints the exit code.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from rollout.cli.__main__ import main

for module in ("rollout.cli.session", "rollout.client", "rollout.workloads.infer.workload"):
    import_module(module)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(asked["cwd"])
        os.environ.update(asked["env"])
        nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for real, standard in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(real, standard)
        sys.argv = ["rollout", *asked["args"]]
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
