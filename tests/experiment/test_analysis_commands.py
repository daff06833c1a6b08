"""`rollout experiment analyze|query|views|trend|report` as a person runs them, and comparisons of other runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts_maker import Truth, make_facts
from job_directories import make_job, record
from rollout.cli.__main__ import app
from rollout.cli.program import command_of
from rollout.model.errors import ConfigError, InputError
from rollout.workloads.experiment.analysis.opening import opened
from rollout.workloads.experiment.analysis.other_runs import Keys
from rollout.workloads.experiment.writer import Tally
from rollout.workloads.job.compare_directories import compare_directories
from rollout.workloads.job.job_directory import read_job_directory

pytest.importorskip("duckdb")
Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    """`rollout experiment ARGUMENTS` in an empty directory: standard output."""
    monkeypatch.chdir(tmp_path)

    def calling(*arguments: str) -> str:
        command_of(app, "rollout")(["experiment", *arguments], prog_name="rollout", standalone_mode=False)
        return capfdbinary.readouterr().out.decode()

    return calling


def runs(tmp_path: Path) -> Path:
    """Two runs in the usual place: one of two variants and a margin, and one of three."""
    made = tmp_path / ".lab/runs"
    pair = {"control": Truth(), "treatment": Truth(shift=2.0, cost=0.02)}
    make_facts(made / "ab", pair, tasks=30, margin=0.05, run_id="01K9ABCDEFGHJKMNPQRSTVWXY1")
    three = {"control": Truth(), "same": Truth(), "worse": Truth(shift=-3)}
    make_facts(
        made / "three", three, tasks=30, experiment_id="three", run_id="01K9ABCDEFGHJKMNPQRSTVWXY2",
        created_at="2026-11-02T00:00:00.000Z",
    )  # fmt: skip
    return made


# ---- analyze


def test_a_large_difference_gets_its_verdict(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    found: dict[str, Any] = json.loads(call("analyze", "ab", "--json"))
    (one,) = found["comparisons"]
    assert (one["baseline_id"], one["variant_id"], one["verdict"]) == ("control", "treatment", "better")
    assert one["low"] < one["difference"] < one["high"] and one["p_holm"] < 0.05 and one["cohens_h"] > 0
    assert (one["non_inferior"], found["margin"], found["view_set"]) == (True, 0.05, "AbTest")
    (cost,) = found["costs"]
    assert cost["low"] < 2.0 < cost["high"]
    text = call("analyze", "ab")
    assert "treatment is better than control: pass rate" in text and "control (baseline)" in text


def test_several_variants_have_corrected_p_values(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    found = json.loads(call("analyze", "three", "--json"))
    by_variant = {one["variant_id"]: one for one in found["comparisons"]}
    assert by_variant["worse"]["verdict"] == "worse" and by_variant["same"]["verdict"] == "inconclusive"
    assert by_variant["worse"]["p_holm"] == pytest.approx(2 * by_variant["worse"]["p_value"])
    assert "name the margin" in call("analyze", "three")


def test_variants_within_the_margin_are_tied(tmp_path: Path, call: Call) -> None:
    make_facts(tmp_path / "run", {"a": Truth(), "b": Truth()}, tasks=400, replications=3, spread=0.0)
    (one,) = json.loads(call("analyze", "./run", "--margin", "0.1", "--json"))["comparisons"]
    assert (one["verdict"], one["non_inferior"]) == ("tied", True)


def test_variants_whose_trials_all_agree_are_tied_once_there_are_enough_tasks(tmp_path: Path, call: Call) -> None:
    for tasks, verdict in ((10, "inconclusive"), (60, "tied")):
        run = make_facts(tmp_path / f"r{tasks}", {"a": Truth(shift=99), "b": Truth(shift=99)}, tasks=tasks)
        (one,) = json.loads(call("analyze", str(run), "--margin", "0.1", "--json"))["comparisons"]
        assert (one["difference"], one["verdict"]) == (0.0, verdict)


def test_two_variants_of_a_run_may_be_named(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    found = json.loads(call("analyze", "three", "--variant", "worse", "--variant", "same", "--json"))
    (one,) = found["comparisons"]
    assert (one["baseline_id"], one["variant_id"], one["verdict"]) == ("worse", "same", "better")
    for key in ("variants", "metrics", "flaky"):  # of no others
        assert {one["variant_id"] for one in found[key]} == {"worse", "same"}
    assert (found["committed"], found["total_slots"]) == (270, 270)


@pytest.mark.parametrize(
    ("run", "fail_if", "code"),
    [
        ("ab", "worse", 0),
        ("ab", "not-better", 0),
        ("three", "worse", 1),
        ("three", "not-better", 1),
        ("one", "worse", 1),
    ],
)
def test_a_verdict_may_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, fail_if: str, code: int
) -> None:
    make_facts(runs(tmp_path) / "one", {"a": Truth()}, tasks=2)
    monkeypatch.chdir(tmp_path)
    command = ["experiment", "analyze", run, "--fail-if", fail_if]
    assert command_of(app, "rollout")(command, prog_name="rollout", standalone_mode=False) == (code or None)


def edited(run: Path, change: Callable[[dict[str, Any]], object], name: str = "trials") -> Path:
    """`run`, with each row of a file of its facts changed."""
    path = run / f"facts/{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


def test_a_grader_that_never_worked_gives_no_verdict_and_fails(tmp_path: Path, call: Call) -> None:
    failed = {"status": "failed", "classification": "verifier_reward_missing", "score": 0.0, "passed": False}
    run = edited(make_facts(tmp_path / "run", {"a": Truth(), "b": Truth()}), lambda row: row.update(failed))
    manifest = run / "facts/run_manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"graded": True}))
    found = json.loads(call("analyze", "./run", "--margin", "0.1", "--json"))
    assert (found["comparisons"], found["ungraded"]) == ([], ["a", "b"])
    command = ["experiment", "analyze", "./run", "--fail-if", "worse"]
    assert command_of(app, "rollout")(command, prog_name="rollout", standalone_mode=False) == 1


def test_a_primary_metric_of_the_agents_decides(tmp_path: Path, call: Call) -> None:
    primary = {"name": "steps", "direction": "minimize"}
    make_facts(tmp_path / "run", {"a": Truth(), "b": Truth(shift=3)}, primary=primary)
    found = json.loads(call("analyze", "./run", "--json"))
    assert found["primary"] == "steps"
    assert {one["measure"]: one["direction"] for one in found["comparisons"]} == {
        "pass_rate": "maximize",
        "steps": "minimize",
    }
    make_facts(tmp_path / "lacking", {"a": Truth(), "b": Truth()}, primary={"name": "none", "direction": "maximize"})
    found = json.loads(call("analyze", "./lacking", "--json"))
    assert found["primary"] == "pass_rate" and "none" in found["notes"][0]


@pytest.mark.parametrize("name", ["score", "steps"])
def test_the_mean_score_is_that_of_the_facts(tmp_path: Path, call: Call, name: str) -> None:
    primary = {"name": name, "direction": "minimize"}
    run = make_facts(tmp_path / "run", {"a": Truth(crash=0.3), "b": Truth()}, primary=primary)
    rows = [json.loads(line) for line in (run / "facts/trials.jsonl").read_text().splitlines()]
    tally = Tally(["a", "b"])  # of the summary
    for row in rows:
        tally.add(row)
    found = json.loads(call("analyze", "./run", "--json"))
    for one in found["variants"]:
        scores = [row["score"] for row in rows if row["variant_id"] == one["variant_id"] and row["score"] is not None]
        assert one["mean_score"]["mean"] == pytest.approx(sum(scores) / len(scores))
        assert tally.to_json()[one["variant_id"]]["mean_score"] == pytest.approx(one["mean_score"]["mean"])
    assert found["primary"] == name


def test_missing_and_pruned_trials_are_counted_and_not_scored(tmp_path: Path, call: Call) -> None:
    variants = {"a": Truth(lost=0.2), "b": Truth(pruned_from=60)}
    make_facts(tmp_path / "run", variants, tasks=20, replications=3)
    found = json.loads(call("analyze", "./run", "--json"))
    a, b = found["variants"]
    assert a["infrastructure"] > 0 and a["scored"] == a["trials"] - a["infrastructure"]
    assert b["pruned"] == 30 and b["scored"] == 30
    assert [note.partition(":")[0] for note in found["notes"]] == ["a", "b"]
    (one,) = found["comparisons"]
    assert one["tasks"] + one["only_a"] + one["only_b"] == 20 and one["only_a"] == 10


def test_the_score_of_a_grade_is_no_second_mean_beside_that_of_the_variants(tmp_path: Path, call: Call) -> None:
    run = make_facts(tmp_path / "run", {"a": Truth(crash=0.3), "b": Truth()})
    with (run / "facts/metrics_long.jsonl").open("a") as file:
        for trial in (run / "facts/trials.jsonl").read_text().splitlines():
            row = json.loads(trial)
            metric = {"metric_name": "score", "metric_value": row["score"], "source": "grade"}
            file.write(json.dumps({key: row[key] for key in ("run_id", "variant_id", "task_id")} | metric) + "\n")
    assert {one["metric"] for one in json.loads(call("analyze", "./run", "--json"))["metrics"]} == {"steps", "coverage"}


def test_a_run_without_a_trial_yet_is_analyzed(tmp_path: Path, call: Call) -> None:
    run = make_facts(tmp_path / "run", {"a": Truth(), "b": Truth()}, tasks=1)
    (run / "facts/trials.jsonl").write_text("")
    assert json.loads(call("analyze", "./run", "--json"))["committed"] == 0
    assert "no trial is committed yet" in call("analyze", "./run")


# ---- two runs


def test_two_runs_are_compared_task_by_task(tmp_path: Path, call: Call) -> None:
    made = runs(tmp_path)
    found = json.loads(call("analyze", "ab", str(made / "three"), "--variant", "control", "--json"))
    (one,) = found["comparisons"]
    assert (one["baseline_id"], one["variant_id"], one["tasks"]) == ("ab/control", "three/control", 30)
    assert len(found["runs"]) == 2
    assert [one["variant_id"] for one in found["variants"]] == ["ab/control", "three/control"]


def test_two_runs_of_one_name_are_told_apart_by_a_legend(tmp_path: Path, call: Call) -> None:
    for place in ("x", "y"):
        make_facts(tmp_path / place / "run", {"a": Truth()}, tasks=3, run_id=f"RUN{place}")
    text = call("analyze", "x/run", "y/run")
    assert "A: x/run, run RUNx, 2026-11-01 00:00" in text and "B: y/run, run RUNy" in text and "B/a" in text


def test_two_jobs_are_compared_as_their_own_command_does(tmp_path: Path, call: Call) -> None:
    a = [record(f"t{n}", reward=float(n < 4)) for n in range(12)] + [record("t99", error="environment_start_failed")]
    b = [record(f"t{n}", reward=float(n < 9)) for n in range(11)] + [record("t11", error="agent_execution_timeout")]
    make_job(tmp_path / "base", a, run_id="01K9ABCDEFGHJKMNPQRSTVWXY1")
    make_job(tmp_path / "trained", b, run_id="01K9ABCDEFGHJKMNPQRSTVWXY2")
    before, after = (read_job_directory(tmp_path / name) for name in ("base", "trained"))
    ((expected,), _) = compare_directories(before, after)
    (one,) = json.loads(call("analyze", "./base", "./trained", "--json"))["comparisons"]
    assert (one["baseline_id"], one["variant_id"]) == ("base/a", "trained/a")
    mine = [one[name] for name in ("tasks", "difference", "low", "high", "p_value", "discordant")]
    other = expected.comparison
    theirs = [other.tasks, other.difference, other.low, other.high, other.p_value, list(other.discordant or ())]
    assert mine == theirs


def test_agents_of_one_job_are_its_variants(tmp_path: Path, call: Call) -> None:
    records = [record(f"t{n}", agent=agent, reward=float(n % 2)) for n in range(6) for agent in ("a", "b")]
    make_job(tmp_path / "job", records)
    found = json.loads(call("analyze", "./job", "--json"))
    assert [one["variant_id"] for one in found["variants"]] == ["a", "b"]
    assert [(one["tasks"], one["difference"]) for one in found["comparisons"]] == [(6, 0.0)]


def test_a_trial_of_a_job_that_was_not_to_be_verified_is_not_scored(tmp_path: Path) -> None:
    make_job(tmp_path / "job", [record("t1", reward=1.0), record("t2")])
    with opened(tmp_path / "job") as found:
        (one,) = found.analyze().variants
        assert (one.trials, one.scored) == (2, 1)


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        (lambda bad: [{"task_id": f"t{n}", "score": float(n < 5 - bad)} for n in range(8)], Keys()),
        (lambda bad: [{"row": n, "result": {"score": n < 5 - bad}} for n in range(8)], Keys()),
        (lambda bad: [{"id": f"t{n}", "outcome": "passed" if n < 5 - bad else "failed"} for n in range(8)], Keys()),
        (
            lambda bad: [{"q": {"id": n}, "answer": {"right": int(n < 5 - bad)}} for n in range(8)],
            Keys("q.id", "answer.right"),
        ),
    ],
)
def test_lines_with_a_unit_and_a_score_are_compared(tmp_path: Path, lines: Any, keys: Keys) -> None:
    for name, bad in (("after", 0), ("before", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines(bad)))
    with opened(tmp_path / "before", tmp_path / "after", keys=keys) as found:
        (one,) = found.analyze().comparisons
        assert (one.tasks, one.difference, one.discordant) == (8, 0.25, (0, 2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n", "lines.jsonl:1: not JSON"),
        ("[]\n", "lines.jsonl:1: must be an object"),
        ('{"a": 1}\n', "--unit"),
        ('{"id": 1}\n', "--score"),
        ('{"id": 1, "score": 1}\n{"score": 1}\n', "lines.jsonl:2: it has no id"),
        ('{"id": 1, "score": [1]}\n', "lines.jsonl:1: score: must be a number"),
        ('{"id": 1, "score": NaN}\n', "lines.jsonl:1"),
        ('{"id": 1, "score": "nan"}\n', "lines.jsonl:1"),
        ('{"id": 1, "score": "50 %"}\n', "lines.jsonl:1"),
    ],
)
def test_lines_that_cannot_be_used_are_located(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=said), opened(path):
        pass


def test_a_score_may_be_a_number_or_an_outcome_in_text(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    scores = ["0.5", " 1e0 ", "PASSED", " failed", "Skipped"]
    path.write_text("".join(json.dumps({"id": n, "score": score}) + "\n" for n, score in enumerate(scores)))
    with opened(path) as found:
        rows = found.database.rows("SELECT value FROM trials ORDER BY schedule_index")
    assert rows == [(0.5,), (1.0,), (1.0,), (0.0,), (None,)]


def test_a_key_of_a_score_that_no_line_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"id": 1, "score": 1}\n{"id": 2, "score": 1}\n')
    with pytest.raises(InputError, match="--score"), opened(path, keys=Keys(score="scores")):
        pass


# ---- query, views, trend


def test_a_query_has_the_same_rows_in_every_format(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    sql = "SELECT variant_id, trials, pass_rate, [1, 2] AS list, '=1' AS text FROM variant_summary"
    as_json = [json.loads(line) for line in call("query", "ab", sql, "--format", "json").splitlines()]
    as_csv = list(csv.DictReader(io.StringIO(call("query", "ab", sql, "--format", "csv"))))
    assert [one["variant_id"] for one in as_json] == ["control", "treatment"]
    assert [float(one["pass_rate"]) for one in as_csv] == [one["pass_rate"] for one in as_json]
    assert (as_csv[0]["list"], as_csv[0]["text"]) == ("[1, 2]", "'=1")  # no formula of a spreadsheet
    call("query", "ab", sql, "--format", "json", "--output", "rows.jsonl")
    assert [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()] == as_json
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    call("query", "ab", sql, "--format", "parquet", "--output", "rows.parquet")
    assert parquet.read_table("rows.parquet").to_pylist() == as_json
    assert "treatment" in call("query", "ab", sql)


def test_a_directory_of_runs_answers_for_all_of_them(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    lines = call("query", ".lab/runs", "SELECT name FROM all_runs", "--format", "json").splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["ab", "three"]


def test_the_views_of_a_run_are_listed_and_shown(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    found = json.loads(call("views", "three", "--json"))
    assert found["view_set"] == "MultiVariant" and "ranking" in {one["view"] for one in found["views"]}
    assert len(call("views", "three", "trials", "--limit", "3", "--json").splitlines()) == 3
    with pytest.raises(ConfigError, match="no view"):
        call("views", "three", "nothing")


def test_the_trend_of_a_project(tmp_path: Path, call: Call) -> None:
    runs(tmp_path)
    rows = [json.loads(line) for line in call("trend", "--json").splitlines()]
    assert [(one["name"], one["variant_id"]) for one in rows][:2] == [("ab", "control"), ("ab", "treatment")]
    assert {json.loads(line)["name"] for line in call("trend", "three", "--json").splitlines()} == {"three"}


OWN = ("facts/trials.jsonl", "facts/new.csv", "manifest.json", "analysis/agentlab.duckdb", "../three/facts/x.csv")
"""Paths relative to a run, which no output may have."""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("analyze", "nothing"), ConfigError),
        (("analyze", "ab", "--variant", "x", "--variant", "control"), ConfigError),
        (("analyze", "ab", "--variant", "control"), ConfigError),
        (("analyze", "ab", "three", "--variant", "treatment"), ConfigError),
        (("query", "ab", "SELECT 1", "--format", "parquet"), ConfigError),
        (("query", "ab", "SELECT 1", "--output", "no/where"), ConfigError),
        (("query", "ab", "DROP VIEW trials"), InputError),
        (("trend", "nothing"), ConfigError),
        (("trend", "--runs-dir", "nowhere"), ConfigError),
        (("report", "ab", "three"), ConfigError),
        (("report", "ab", "--output", "no/where.html"), ConfigError),
        *(
            (("query", "ab", "SELECT 1", "--format", "csv", "--output", f".lab/runs/ab/{name}"), ConfigError)
            for name in OWN
        ),
        *((("report", "ab", "--output", f".lab/runs/ab/{name}"), ConfigError) for name in OWN),
        (("analyze", ".lab/runs"), ConfigError),
        (("report", ".lab/runs", "--output", "x.html"), ConfigError),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, call: Call, arguments: tuple[str, ...], error: type) -> None:
    runs(tmp_path)
    with pytest.raises(error):
        call(*arguments)
