"""`rollout test history`: statistics of tests from earlier runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import typer

from rollout.cli.options import JsonOption
from rollout.model.errors import InputError
from rollout.workloads.test.cases import Status
from rollout.workloads.test.commands.arguments import ConfigOption
from rollout.workloads.test.history import TestHistory

_MARKS = {Status.PASSED: ".", Status.SKIPPED: "s", Status.XFAILED: "x", Status.XPASSED: "X", Status.FLAKY: "f"}
_ORDERS: dict[str, Callable[[TestHistory], tuple[float, ...]]] = {
    "failures": lambda test: (-test.failure_rate, -test.flaky),
    "flaky": lambda test: (-test.flaky, -test.failure_rate),
    "slow": lambda test: (-test.expected_s,),
}


def history(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Only tests that did not pass in this run.",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[Literal["failures", "flaky", "slow"], typer.Option("--sort", help="Order.")] = "failures",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Tests to show; 0: all.")] = 20,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print how often tests failed and how long they take, from the project's history.

    Marks show the newest runs, the newest last: `.` passed, `f` flaky, `F` failed, `s` skipped, `x` failed as expected,
    `X` passed unexpectedly. --json: an object per line, {id, group, tries, failures, failure_rate, flaky, expected_s,
    statuses}.
    """
    from rollout.cli.show import print_json, print_table, table
    from rollout.workloads.test.workload import Test

    found = Test().history_here(config)
    tests = found.tests()
    if run is not None:
        number = _number(found.runs(), run)
        tests = [test for test in tests if dict(test.statuses).get(number, Status.PASSED) is not Status.PASSED]
    tests.sort(key=lambda test: (*_ORDERS[sort](test), test.group, test.id))
    shown = tests[:limit] if limit else tests
    if json:
        for test in shown:
            print_json(_fields(test))
        return
    rows = table("failed", "flaky", "expected", "newest runs", "test")
    for test in shown:
        marks = "".join(_MARKS.get(status, "F") for _, status in test.statuses)
        rows.add_row(f"{test.failure_rate:.0%}", str(test.flaky), f"{test.expected_s:.2f} s", marks, test.id)
    print_table(rows, "no tests are known")


def _number(runs: dict[str, int], run: str) -> int:
    wanted = run.upper()
    found = [number for id, number in runs.items() if id.startswith(wanted) or id.endswith(wanted)]
    if len(found) != 1 or not wanted:
        known = ", ".join(id[-8:] for id in list(runs)[-10:]) or "none"
        what = "more than one run" if found else "no run"
        raise InputError(f"{what} of the history is called {run}: there are {known}")
    return found[0]


def _fields(test: TestHistory) -> dict[str, object]:
    return {
        "id": test.id,
        "group": test.group,
        "tries": test.tries,
        "failures": test.failures,
        "failure_rate": round(test.failure_rate, 4),
        "flaky": test.flaky,
        "expected_s": round(test.expected_s, 6),
        "statuses": [status.value for _, status in test.statuses],
    }
