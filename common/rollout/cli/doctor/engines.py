"""Check whether engines can be imported, each in its own process, because an import may take long or crash."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any, cast

from rollout.cli.doctor.finding import Finding, fault, ok
from rollout.processes.command import run_async

LIMIT_S = 90.0
ENGINES: dict[str, tuple[str, ...]] = {
    "transformers": ("torch", "transformers", "accelerate", "llguidance"),
    "vllm": ("torch", "transformers", "vllm"),
}
"""Packages that each backend imports."""

_CODE = """
import importlib, json, sys
found, error = {}, None
for name in sys.argv[1:] or %r:
    try:
        module = importlib.import_module(name)
        found[name] = str(getattr(module, "__version__", "?"))
    except BaseException as e:
        error = {"package": name, "what": f"{type(e).__name__}: {e}"}
        break
cuda = None
if "torch" in found:
    import torch
    cuda = torch.version.cuda if torch.cuda.is_available() else ""
print("\\n" + json.dumps({"found": found, "error": error, "cuda": cuda}))
"""


async def engine(kind: str) -> list[Finding]:
    """Check the backend `kind`. A missing backend is no fault: most machines of a cluster need none."""
    name = f"engine ({kind})"
    missing = [package for package in ENGINES[kind] if not _is_there(package)]
    if kind in missing or "torch" in missing:
        return [ok(name, f'not installed here; a worker that is to run it needs: pip install "rollout-engine[{kind}]"')]
    if missing:
        return [fault(name, f"{', '.join(missing)} is not installed", f'pip install "rollout-engine[{kind}]"')]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", "-c", _CODE % (ENGINES[kind],)]
    done = await run_async(command, env=os.environ | quiet)
    try:
        said = cast("dict[str, Any]", json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        words = done.reason or f"exit code {done.code}"
        return [fault(name, f"importing it ends the process: {words[:300]}", "install it again, for this Python")]
    if said["error"] is not None:
        broken = said["error"]
        return [
            fault(
                name,
                f"{broken['package']} cannot be imported: {str(broken['what'])[:300]}",
                f'pip install --upgrade "rollout-engine[{kind}]": its packages must fit each other',
            )
        ]
    versions = ", ".join(f"{package} {version}" for package, version in said["found"].items())
    device = f"CUDA {said['cuda']}" if said["cuda"] else "CPU only"
    return [ok(name, f"{versions}; {device}")]


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
