"""Counts the tokens of datasets for a dry run. Standard input is a JSON object, the last line of output another.

`python -m rollout_worker.backends.training.tokens`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from rollout.model.errors import AttemptError
from rollout.model.problems import problems
from rollout.workloads.train.config import SECTIONS, Kind
from rollout.workloads.train.templates import find_template

from rollout_worker.backends.training.prepare import files_of, positions_of, prepare, read_config, read_tokenizer


def counted(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the report of each dataset and the template, or the fault with its code."""
    kind = cast(Kind, asked["kind"])
    settings = SECTIONS[kind].model_validate(asked["settings"])
    reports: dict[str, Any] = {}
    faults: list[str] = []
    try:
        tokenizer = read_tokenizer(asked["tokenizer"])
        positions = positions_of(read_config(asked["model"])) if asked["model"] else None
        for name, given in asked["datasets"].items():
            try:
                files = files_of(given, Path())
                _, report = prepare(kind, settings, files, tokenizer, positions=positions)
                reports[name] = report.to_json()
            except AttemptError as error:
                if error.error_code != "invalid_data":
                    raise
                faults.append(error.message)
    except AttemptError as error:
        return {"error": error.message, "code": error.error_code}
    if faults:
        return {"error": problems(faults), "code": "invalid_data"}
    return {"data": reports, "template": find_template(tokenizer, settings.base_model.chat_template).name}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(counted(json.load(sys.stdin))) + "\n")
