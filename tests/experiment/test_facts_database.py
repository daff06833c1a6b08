"""The views over facts against counting in Python; and queries, which read the views and nothing else."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from facts_maker import Truth, make_facts
from rollout.model.errors import ConfigError, InputError, StorageFullError
from rollout.workloads.experiment.analysis import database as database_module
from rollout.workloads.experiment.analysis import opening
from rollout.workloads.experiment.analysis.database import Database, QueryError, QueryTimeoutError
from rollout.workloads.experiment.analysis.opening import DATABASE, SCRIPT, opened
from rollout.workloads.experiment.analysis.sources import read_source
from rollout.workloads.experiment.analysis.view_sets import ViewSet
from rollout.workloads.experiment.contracts import EVENTS_BYTES_MAX
from rollout.workloads.output import STATE, mark_of, seal

duckdb: Any = pytest.importorskip("duckdb")

BASE = {
    "trials", "metrics_long", "events", "variant_snapshots", "variant_summary", "task_variant_matrix", "run_progress",
    "task_flakiness", "failure_clusters", "pass_at_k", "task_difficulty",
}  # fmt: skip
VARIANTS = {
    "control": Truth(lost=0.1),
    "treatment": Truth(shift=0.7, lost=0.05, crash=0.1, bindings={"model": "b", "depth": [1, 2]}),
}


def facts(run: Path, name: str = "trials") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"facts/{name}.jsonl").read_text().splitlines()]


def records(database: Database, sql: str) -> list[dict[str, Any]]:
    with database.query(sql) as answer:
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_facts(tmp_path_factory.mktemp("runs") / "ab", VARIANTS, tasks=25, replications=3)


@pytest.fixture(scope="module")
def database(run: Path) -> Iterator[Database]:
    with opened(run) as found:
        yield found.database


# ---- views


@pytest.mark.parametrize(
    ("comparison", "variants", "view_set", "more"),
    [
        ("paired", 2, ViewSet.AB_TEST, {"win_loss_tie"}),
        ("paired", 3, ViewSet.MULTI_VARIANT, {"win_loss_tie", "ranking"}),
        ("unpaired", 3, ViewSet.PARAMETER_SWEEP, {"best_config", "ranking"}),
        ("none", 1, ViewSet.REGRESSION, {"trend", "all_runs", "all_trials", "pass_rate_trend"}),
    ],
)
def test_the_design_chooses_the_views(
    tmp_path: Path, comparison: str, variants: int, view_set: ViewSet, more: set[str]
) -> None:
    named = {f"v{n}": Truth(bindings={"n": n}) for n in range(variants)}
    with opened(make_facts(tmp_path / "run", named, tasks=3, comparison=comparison)) as found:
        assert found.database.view_set is view_set
        views = found.database.views()
        assert BASE | more <= set(views)
        for view in views:
            records(found.database, f"FROM {view}")


def test_a_summary_counts_what_the_facts_say(run: Path, database: Database) -> None:
    rows = facts(run)
    for found in records(database, "FROM variant_summary"):
        mine = [row for row in rows if row["variant_id"] == found["variant_id"]]
        lost = [row for row in mine if row["classification"] == "environment_lost"]
        passed = sum(row["passed"] is True for row in mine)
        assert (found["trials"], found["infrastructure"], found["pruned"]) == (len(mine), len(lost), 0)
        # A crash is the agent's own doing and counts as 0; a lost environment counts as nothing.
        assert found["scored"] == len(mine) - len(lost)
        assert found["pass_rate"] == pytest.approx(passed / found["scored"])
        assert found["cost_usd"] == pytest.approx(math.fsum(row["cost_usd"] or 0 for row in mine))


def test_wins_losses_and_ties_are_those_of_the_task_means(run: Path, database: Database) -> None:
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in facts(run):
        if row["classification"] != "environment_lost":
            values[row["task_id"], row["variant_id"]].append(row["score"] or 0.0)
    means = {key: sum(scores) / len(scores) for key, scores in values.items()}
    tasks = {task for task, _ in means}
    differences = [means[task, "treatment"] - means[task, "control"] for task in tasks]
    (found,) = records(database, "FROM win_loss_tie")
    counts = [
        sum(one > 0 for one in differences),
        sum(one < 0 for one in differences),
        sum(not one for one in differences),
    ]
    assert [found["wins"], found["losses"], found["ties"]] == counts
    assert found["mean_difference"] == pytest.approx(sum(differences) / len(differences))


def test_pass_at_k_in_sql_is_the_estimate_of_the_library(database: Database, run: Path) -> None:
    with opened(run) as found:
        expected = {
            (one.variant_id, each.k): each.value.mean
            for one in found.analyze().variants
            for each in one.pass_at_k
            if each.k > 1  # of one trial a task ours is weighted by trials where tasks have equally many
        }
    rows = {(row["variant_id"], row["k"]): row["pass_at_k"] for row in records(database, "FROM pass_at_k")}
    assert {key: rows[key] for key in expected} == pytest.approx(expected)


def test_failures_with_the_same_message_but_for_ids_and_numbers_are_one_cluster(database: Database) -> None:
    found = {row["classification"]: row for row in records(database, "FROM failure_clusters")}
    assert found["environment_lost"]["pattern"] == "worker <id> was lost after <n> s"
    assert found["agent_execution_failed"]["pattern"] == "exit code <n>: <text> in <path> line <n>"
    assert len(found) == 2


def test_flaky_tasks_are_those_whose_replications_differ(run: Path, database: Database) -> None:
    passes: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for row in facts(run):
        if row["classification"] != "environment_lost":
            passes[row["task_id"], row["variant_id"]].add(bool(row["passed"]))
    found = {(row["task_id"], row["variant_id"]) for row in records(database, "FROM task_flakiness")}
    assert found == {key for key, seen in passes.items() if len(seen) == 2}


def test_the_lowest_score_may_be_the_best(tmp_path: Path) -> None:
    primary = {"name": "score", "direction": "minimize"}
    named = {"a": Truth(), "b": Truth(shift=3, crash=0.2), "c": Truth(shift=-3)}
    with opened(make_facts(tmp_path / "run", named, primary=primary)) as found:
        assert [row["variant_id"] for row in records(found.database, "FROM ranking")] == ["c", "a", "b"]
        # A crash is no score of 0, which would be the best there is.
        crashed = "SELECT value, pass FROM trials WHERE classification = 'agent_execution_failed'"
        assert {(row["value"], row["pass"]) for row in records(found.database, crashed)} == {(None, 0.0)}


def test_a_sweep_ranks_configurations_by_their_bindings(tmp_path: Path) -> None:
    named = {f"t{n}": Truth(shift=2.0 * n, bindings={"temperature": n / 2}) for n in range(3)}
    with opened(make_facts(tmp_path / "run", named, comparison="unpaired")) as found:
        best, *_ = records(found.database, "FROM best_config")
        assert (best["variant_id"], json.loads(best["bindings"])) == ("t2", {"temperature": 1.0})
        assert len(records(found.database, "FROM binding_effects")) == 3


def test_runs_of_one_experiment_make_a_trend(tmp_path: Path) -> None:
    for number, shift in enumerate((0.0, 2.0)):
        make_facts(
            tmp_path / f"r{number}", {"main": Truth(shift=shift)}, comparison="none", run_id=f"RUN{number}",
            created_at=f"2026-11-0{number + 1}T00:00:00.001Z",
        )  # fmt: skip
    make_facts(tmp_path / "other", {"main": Truth()}, experiment_id="other", run_id="RUN9")
    manifest = tmp_path / "r1/facts/run_manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"forked_from": {"run_id": "RUN0", "slots": 3}}))
    with opened(tmp_path / "r1") as found:
        first, second = records(found.database, "FROM trend")
        assert (first["forked_from"], second["forked_from"]) == (None, "RUN0")
        assert (first["run_id"], second["run_id"]) == ("RUN0", "RUN1")
        assert second["change"] == pytest.approx(second["pass_rate"] - first["pass_rate"]) and second["change"] > 0
        assert {row["run_id"] for row in records(found.database, "FROM trials")} == {"RUN1"}
    shutil.copytree(tmp_path / "r1", tmp_path / "r1-copy")  # counts once
    with opened(tmp_path) as found:
        assert [row["run_id"] for row in records(found.database, "FROM all_runs")] == ["RUN9", "RUN0", "RUN1"]
        assert len(records(found.database, "FROM all_trials")) == 180


# ---- files


def test_the_database_and_its_script_are_kept_and_the_script_makes_the_same(
    run: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(run, keep=True):
        pass
    monkeypatch.chdir(run)
    again = duckdb.connect(":memory:", config={"threads": 1})
    again.execute(Path(SCRIPT).read_text())
    with duckdb.connect(DATABASE, read_only=True, config={"threads": 1}) as kept:
        for view in database.views():
            expected = database.rows(f"FROM {view}")
            assert kept.execute(f"FROM {view}").fetchall() == expected
            assert again.execute(f"FROM {view}").fetchall() == expected
    again.close()


def test_a_program_that_holds_the_kept_database_disturbs_nobody(run: Path) -> None:
    with opened(run, keep=True):
        pass
    holder = duckdb.connect(str(run / DATABASE))
    with opened(run, keep=True) as found:
        assert found.database.notes == ()
    holder.close()
    assert [path.name for path in (run / DATABASE).parent.iterdir() if path.name.startswith(".")] == []


def test_a_database_that_cannot_be_kept_is_in_memory(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    (run / "analysis").write_text("a file where the directory should be")
    with opened(run, keep=True) as found:
        assert "not kept" in found.database.notes[0]
        assert records(found.database, "SELECT count(*) AS n FROM trials") == [{"n": 12}]


def test_a_disk_that_is_full_keeps_nobody_from_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, notes: list[str]) -> Any:
        duckdb.connect(str(path)).close()
        return duckdb.connect(str(path), read_only=True)

    def full(path: Path, data: bytes) -> None:
        raise StorageFullError("no space left")

    monkeypatch.setattr(database_module, "_file", refused)
    monkeypatch.setattr(opening, "write_atomically", full)
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    with opened(run, keep=True) as found:
        assert "not kept" in found.database.notes[0]
        assert records(found.database, "SELECT count(*) AS n FROM trials") == [{"n": 12}]
    assert list((run / "analysis").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "slot 0 of run"),
        ({"schedule_index": 900, "run_id": "01K9OTHER"}, "another run, 01K9OTHER"),
        ({"schedule_index": 900, "variant_id": "who"}, "are of who"),
        ({"schedule_index": 900}, "13 rows"),
    ],
)
def test_rows_that_no_run_wrote_are_warned_of(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    with (run / "facts/trials.jsonl").open("a") as file:
        file.write(json.dumps(facts(run)[0] | change) + "\n")
    with opened(run) as found:
        assert any(said in note for note in found.database.notes)


def test_facts_that_are_not_what_was_saved_are_warned_of(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    mark = mark_of(run / "facts/trials.jsonl")
    assert mark is not None
    (run / STATE).write_bytes(seal({"files": {"facts/trials.jsonl": asdict(mark)}}))
    with opened(run) as found:
        assert found.database.notes == ()
    path = run / "facts/trials.jsonl"
    path.write_text(path.read_text().replace('"outcome": "success"', '"outcome": "failure"', 1))
    with opened(run) as found:
        (note,) = found.database.notes
        assert "trials.jsonl" in note and "rollout experiment continue" in note


def test_a_line_that_is_being_written_is_left_out_and_noted(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=2)
    with (run / "facts/trials.jsonl").open("a") as file:
        file.write('{"run_id": "01K9ABCD')
    with opened(run) as found:
        assert "trials.jsonl" in found.database.notes[0]
        assert records(found.database, "SELECT count(*) AS n FROM trials") == [{"n": 12}]


@pytest.mark.parametrize(
    ("line", "where"),
    [("{not json}", "trials.jsonl:2"), ("[1]", "trials.jsonl:2"), ('{"schedule_index": "first"}', "line 2")],
)
def test_a_damaged_line_is_located(tmp_path: Path, line: str, where: str) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=1)
    path = run / "facts/trials.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, line, *rest, ""]))
    with pytest.raises(InputError, match=where), opened(run):
        pass


@pytest.mark.parametrize("number", ["NaN", '"nan"', "1e999"])
@pytest.mark.parametrize(("name", "column"), [("trials", "score"), ("metrics_long", "metric_value")])
def test_a_number_that_is_not_finite_is_located(tmp_path: Path, name: str, column: str, number: str) -> None:
    path = make_facts(tmp_path / "run", {"a": Truth()}, tasks=2) / f"facts/{name}.jsonl"
    first, second, *rest = path.read_text().splitlines()
    second = json.dumps(json.loads(second) | {column: "HERE"}).replace('"HERE"', number)
    path.write_text("\n".join([first, second, *rest, ""]))
    with pytest.raises(InputError, match=f"{name}.jsonl:2: {column}"), opened(tmp_path / "run"):
        pass


def test_all_faults_of_a_manifest_are_located(tmp_path: Path) -> None:
    path = make_facts(tmp_path / "run", VARIANTS, tasks=1) / "facts/run_manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_slots": -1, "baseline": 7}))
    with pytest.raises(InputError) as caught:
        read_source(tmp_path / "run")
    assert all(f"{name}:" in caught.value.message for name in (str(path), "total_slots", "baseline"))


def test_files_without_rows_and_files_that_are_not_there_are_empty_views(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "a[b]*'c", VARIANTS, tasks=1)
    (run / "facts/trials.jsonl").write_text("")
    (run / "facts/events.jsonl").unlink()
    with opened(run) as found:
        assert records(found.database, "FROM trials") == records(found.database, "FROM events") == []
        assert len(records(found.database, "FROM metrics_long")) > 0
        assert found.analyze().variants == ()


def test_the_largest_event_is_read(tmp_path: Path) -> None:
    run = make_facts(tmp_path / "run", VARIANTS, tasks=1)
    path = run / "facts/events.jsonl"
    event = json.loads(path.read_text().splitlines()[0]) | {"payload": {"text": "x" * (EVENTS_BYTES_MAX - 30)}}
    path.write_text(json.dumps(event) + "\n")
    with opened(run) as found:
        (row,) = records(found.database, "SELECT length(payload) AS length FROM events")
        assert row["length"] > EVENTS_BYTES_MAX - 30


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), opened(tmp_path):
        pass


# ---- queries

READING = [
    "SELECT count(*) FROM trials",
    "WITH a AS (SELECT 1) FROM a",
    "FROM variant_summary",
    "VALUES (1)",
    "EXPLAIN SELECT 1",
    "EXPLAIN ANALYZE SELECT count(*) FROM trials",
    "SHOW TABLES",
    "DESCRIBE trials",
    "SUMMARIZE metrics_long",
    "SELECT 1;",
    "SELECT ';' -- ; COPY",
]
HOSTILE = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_blob('/etc/passwd')",
    "SELECT * FROM read_json('/etc/passwd')",
    "SELECT * FROM read_ndjson_objects('/etc/passwd')",
    "SELECT * FROM parquet_metadata('/etc/passwd')",
    "SELECT * FROM sniff_csv('/etc/passwd')",
    "SELECT * FROM glob('/etc/*')",
    "SELECT * FROM read_parquet('http://127.0.0.1:1/x')",
    "SELECT getenv('HOME')",
    "COPY trials TO '/tmp/rollout-hostile.csv'",
    "COPY (SELECT 1) TO '/tmp/rollout-hostile.csv'",
    "EXPLAIN ANALYZE COPY trials TO '/tmp/rollout-hostile.csv'",
    "EXPORT DATABASE '/tmp/rollout-hostile'",
    "IMPORT DATABASE '/tmp/rollout-hostile'",
    "ATTACH '/tmp/rollout-hostile.db'",
    "DETACH memory",
    "USE memory",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET threads = 1",
    "SET enable_external_access = true",
    "RESET threads",
    "SET VARIABLE x = 1",
    "PRAGMA database_list",
    "PRAGMA enable_profiling",
    "CALL pragma_version()",
    "CALL enable_logging(storage = 'file', storage_path = '/tmp/rollout-hostile')",
    "SELECT * FROM enable_logging(storage = 'file', storage_path = '/tmp/rollout-hostile')",
    "SELECT * FROM duckdb_secrets()",
    "CREATE SECRET (TYPE s3)",
    "CREATE TABLE x (i INT)",
    "CREATE VIEW x AS SELECT 1",
    "CREATE MACRO x() AS 1",
    "INSERT INTO facts_trials SELECT * FROM facts_trials",
    "UPDATE facts_trials SET score = 1",
    "DELETE FROM facts_trials",
    "TRUNCATE facts_trials",
    "MERGE INTO facts_trials USING facts_trials AS b ON true WHEN MATCHED THEN DELETE",
    "WITH x AS (DELETE FROM facts_trials RETURNING 1) FROM x",
    "WITH x AS (INSERT INTO facts_trials SELECT * FROM facts_trials RETURNING 1) FROM x",
    "EXPLAIN ANALYZE DELETE FROM facts_trials",
    "SELECT * FROM query('DELETE FROM facts_trials')",
    "DROP VIEW trials",
    "ALTER TABLE facts_trials ADD COLUMN x INT",
    "COMMENT ON TABLE facts_trials IS 'x'",
    "VACUUM",
    "CHECKPOINT",
    "BEGIN",
    "COMMIT",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW trials",
    "COMMIT; DELETE FROM facts_trials",
    "",
    "-- nothing",
    "SELEC 1",
    "SELECT nothing FROM trials",
    "SELECT * FROM HOSTILE",  # a list of this module: Python's variables are no tables
    "SELECT length(repeat('x', 30000000000))",
    "SELECT list(range) FROM range(1000000000)",
]


@pytest.mark.parametrize("sql", READING)
def test_what_reads_is_answered(database: Database, sql: str) -> None:
    assert records(database, sql)


@pytest.mark.parametrize("sql", HOSTILE)
def test_what_could_write_or_read_elsewhere_is_refused(run: Path, database: Database, sql: str) -> None:
    before = database.rows("SELECT count(*), sum(score) FROM facts_trials")
    with pytest.raises(QueryError):
        records(database, sql)
    assert not list(Path("/tmp").glob("rollout-hostile*"))
    assert database.rows("SELECT count(*), sum(score) FROM facts_trials") == before


@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE r AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r",
        "SELECT count(*) FROM range(1000000000) a, range(1000000000) b WHERE (a.range * b.range) % 7 = 3",
        "SELECT * FROM range(100000000000)",  # as its rows are read
    ],
)
def test_a_query_without_an_end_is_stopped_and_the_next_one_is_answered(database: Database, sql: str) -> None:
    with pytest.raises(QueryTimeoutError), database.query(sql, time_limit_s=0.5) as answer:
        for _ in answer.rows:
            pass
    assert records(database, "SELECT 1 AS one") == [{"one": 1}]


def test_a_query_that_cannot_be_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function over one huge value is not: DuckDB looks for an interrupt between values."""
    monkeypatch.setattr("rollout.workloads.experiment.analysis.database._GRACE_S", 0.2)
    real = duckdb.connect(":memory:")

    class Deaf:
        def __getattr__(self, name: str) -> Any:
            return (lambda: None) if name == "interrupt" else getattr(real, name)

    endless = "SELECT count(*) FROM range(1000000000) a, range(1000000000) b WHERE (a.range * b.range) % 7 = 3"
    database = Database(Deaf(), ViewSet.AB_TEST, ())
    with pytest.raises(QueryTimeoutError), database.query(endless, time_limit_s=0.1, stuck=real.interrupt):
        pass
