"""The agent `function(row, **bindings)`: runs in the sandbox next to the code of its argument, a function
MODULE:FUNCTION.

It uses only the standard library of Python 3.8 and later.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Dict, cast  # noqa: UP035 - of Python 3.8


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    task: Any = json.loads(Path(os.environ["AGENTLAB_TASK_PATH"]).read_text("utf-8"))
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if inspect.isclass(function):
        function = function()
    said: Any = function(task["task"], **task["bindings"])
    if inspect.isawaitable(said):
        said = asyncio.run(_awaited(said))
    Path(os.environ["AGENTLAB_RESULT_PATH"]).write_text(json.dumps({"ids": task["ids"], **result(said)}), "utf-8")


async def _awaited(said: Awaitable[Any]) -> Any:
    return await said


def result(said: Any) -> dict[str, Any]:
    """Return a result: a dictionary with an outcome is one, a truth value is an outcome, anything else is the
    answer."""
    if isinstance(said, dict) and "outcome" in said:
        return cast(Dict[str, Any], said)  # noqa: UP006
    if isinstance(said, bool):
        return {"outcome": "success" if said else "failure"}
    return {"outcome": "success", "answer": said}


if __name__ == "__main__":
    main()
