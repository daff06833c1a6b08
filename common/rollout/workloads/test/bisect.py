"""Finds the test that breaks another one by running before it: subsets run again, each in a fresh process."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.model.errors import ConfigError, InputError
from rollout.processes.child import PIPE
from rollout.processes.command import start
from rollout.workloads.test.cases import GOOD, Outcome, Try
from rollout.workloads.test.frames import Splitter
from rollout.workloads.test.frameworks.pytest import RUNNER
from rollout.workloads.test.result_lines import Line
from rollout.workloads.test.run_config import GroupConfig

_PIECE = 64 << 10


def ran_before(lines: Iterable[Line], id: str) -> tuple[str, list[str]]:
    """Return the group of a test, and the tests that its process ran before its first failure, in order. Raises
    InputError if it did not fail."""
    tries: dict[tuple[str, str], list[tuple[float, str]]] = {}
    failed: tuple[Try, str] | None = None
    known = False
    for line in lines:
        for one in line.result.tries:
            tries.setdefault((one.worker, one.process), []).append((one.started, line.case.id))
            if line.case.id == id:
                known = True
                if failed is None and one.outcome not in GOOD:
                    failed = one, line.case.group
    if failed is None:
        what = "passed in that run: there is nothing to look for" if known else "is no test of that run"
        raise InputError(f"{id} {what}")
    made, group = failed
    before = sorted(one for one in tries[made.worker, made.process] if one[0] < made.started)
    return group, list(dict.fromkeys(other for _, other in before if other != id))


def minimal(ids: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a minimal part of `ids` that still `fails` (ddmin: Zeller and Hildebrandt, 2002). If one id is the reason,
    this is a binary search. `fails(ids)` is known to be true."""
    found, pieces = list(ids), 2
    while len(found) > 1:
        size = -(-len(found) // pieces)
        parts = [found[at : at + size] for at in range(0, len(found), size)]
        rests = [[one for one in found if one not in part] for part in parts] if pieces > 2 else []
        smaller = next((part for part in (*parts, *rests) if fails(part)), None)
        if smaller is not None:
            pieces = 2 if len(smaller) <= size else max(pieces - 1, 2)
            found = smaller
        elif pieces >= len(found):
            break
        else:
            pieces = min(pieces * 2, len(found))
    return found


def outcome_after(
    before: Sequence[str], id: str, root: Path, config: GroupConfig, env: Mapping[str, str]
) -> Outcome | None:
    """Run a test after others in a fresh process of pytest, on this machine. Returns None if it was not reached."""
    token = secrets.token_hex(8)
    run_args: list[str] = config.options.get("run_args", [])
    words = [*config.python, str(RUNNER), "run", token, *config.args, *run_args]
    outcome: Outcome | None = None

    def hear(data: bytes) -> None:
        nonlocal outcome
        event: dict[str, Any] = json.loads(data)
        if event.get("start") == id:
            outcome = Outcome.CRASHED  # until it ends
        elif event.get("end") == id:
            outcome = Outcome(event["outcome"])

    try:
        process = start(words, cwd=root, env={**os.environ, **env}, stdin=PIPE, stdout=PIPE)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be run: {error.strerror or error}") from error
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"run": [*before, id]}).encode() + b"\n")
            process.stdin.close()
            stdout = Splitter(token, lambda text: None, hear)
            while data := os.read(process.stdout.fileno(), _PIECE):
                stdout.feed(data)
        except BrokenPipeError:
            return None
        finally:
            if outcome is None:
                process.kill()
    return outcome
