"""A run of an experiment, analysed by the commands as a user types them."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest
from acceptance_cli import Cli
from test_experiment import directory, run, write

pytest.importorskip("duckdb")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")


def test_a_run_is_analysed_queried_and_reported(cli: Cli) -> None:
    run(cli, "run", write(cli, tasks=6))
    found = json.loads(run(cli, "analyze", "@last", "--json").out)
    (one,) = found["comparisons"]
    assert (one["baseline_id"], one["variant_id"], one["verdict"]) == ("a", "b", "worse")
    assert (found["committed"], found["total_slots"], one["discordant"]) == (12, 12, [6, 0])
    rows = run(cli, "query", "e", "SELECT variant_id, pass_rate FROM variant_summary", "--format", "csv").out
    assert [row["pass_rate"] for row in csv.DictReader(io.StringIO(rows))] == ["1.0", "0.0"]
    assert run(cli, "query", "e", "COPY trials TO 'x'", code=2).out == ""
    run(cli, "report", "e")
    page = (directory(cli) / "report.html").read_text()
    assert 'href="trials/trial_000001/stdout.log"' in page and ">patch cumulative</a>" in page
