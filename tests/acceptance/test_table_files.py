"""Tables in and out of `rollout infer batch` and `rollout map`, whatever is killed meanwhile."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from acceptance_cli import Cli

ROWS = 400
KEPT = ("prompt", "n", "score", "tags", "about")


def table(path: Path, count: int = ROWS) -> list[dict[str, Any]]:
    """Rows of every type that JSON has, in small row groups; those that should come out."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"row {n}", "n": n, "score": n / 3, "tags": [f"{n}"] * (n % 3), "about": {"odd": n % 2 == 1}}
        for n in range(count)
    ]
    written = [{**row, "at": datetime(2026, 1, 1)} for row in rows]
    parquet.write_table(pa.Table.from_pylist(written), path, row_group_size=37)
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path, columns=list(KEPT)).to_pylist()


def batch(cli: Cli, **backend: Any) -> tuple[str, ...]:
    sections = {"input": {"glob": "in.parquet"}, "output": {"format": "parquet"}, "backend": backend}
    return ("infer", "batch", "--config", str(cli.config(**sections)))


def test_rows_extra_columns_and_types_survive_the_way_through_a_model(cli: Cli) -> None:
    rows = table(cli.directory / "in.parquet")
    done = cli.run(*batch(cli))
    assert done.code == 0 and "completions.parquet" in done.out, done
    found = cli.directory / "out" / "completions.parquet"
    assert read(found) == rows
    assert set(parquet.read_table(found)["at"].to_pylist()) == {"2026-01-01T00:00:00"}

    found.unlink()
    again = cli.run(*batch(cli))
    assert again.code == 0 and "made now: out/completions.parquet" in again.out, again
    assert read(found) == rows

    run_id = (cli.directory / "out" / "run-id").read_text().strip()
    copy = cli.run("run", "results", run_id, "--dir", "out", "--output", "copy", "--set", "format=parquet")
    assert copy.code == 0, copy
    assert (cli.directory / "copy" / "completions.parquet").read_bytes() == found.read_bytes()


def test_killed_and_run_again_each_row_is_there_once(cli: Cli) -> None:
    rows = table(cli.directory / "in.parquet")
    command = batch(cli, delay_ms=20, concurrency=4)
    for count in (50, 150):
        process = cli.start(*command)
        cli.wait_for_rows(count, process)
        process.kill()
        process.wait()
        assert not (cli.directory / "out" / "completions.parquet").exists()
    done = cli.run(*command)
    assert done.code == 0, done
    assert read(cli.directory / "out" / "completions.parquet") == rows


def test_a_function_over_csv_and_parquet(cli: Cli) -> None:
    (cli.directory / "score.py").write_text("def score(row):\n    return {'sum': int(row['a']) + 1, 'row': row}\n")
    (cli.directory / "in.csv").write_text('a,b\n1,"x, y"\n2,\n')
    parquet.write_table(pa.table({"a": [3], "b": [1.5]}), cli.directory / "in.parquet")
    config = cli.directory / "map.toml"
    config.write_text('[output]\ndir = "out"\nformat = "parquet"\n')
    inputs = ("--input", "in.csv", "--input", "in.parquet")
    done = cli.run("map", "score:score", *inputs, "--output", "out", "--config", str(config))
    assert done.code == 0, done
    lines = (cli.directory / "out" / "results.jsonl").read_text().splitlines()
    results = [{"sum": 2, "row": {"a": "1", "b": "x, y"}}, {"sum": 3, "row": {"a": "2"}}, {"sum": 4, "row": {"a": 3, "b": 1.5}}]  # fmt: skip
    assert [json.loads(line)["result"] for line in lines] == results
    found = parquet.read_table(cli.directory / "out" / "results.parquet").to_pylist()
    assert [(row["row"], row["result"]["sum"]) for row in found] == [(1, 2), (2, 3), (3, 4)]


def test_embeddings_have_a_table_of_their_own(cli: Cli) -> None:
    lines = [{"embed": "one", "n": 1}, {"prompt": "two", "n": 2}]
    (cli.directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = cli.run("infer", "batch", "--config", str(cli.config(output={"format": "parquet"})))
    assert done.code == 0, done
    tables = {name: parquet.read_table(cli.directory / "out" / f"{name}.parquet") for name in ("embeddings", "completions")}  # fmt: skip
    assert [table["n"].to_pylist() for table in tables.values()] == [[1], [2]]
    (vector,) = tables["embeddings"]["embedding"].to_pylist()
    (line,) = map(json.loads, (cli.directory / "out" / "embeddings.jsonl").read_text().splitlines())
    assert vector == line["embedding"]


@pytest.mark.parametrize("kind", ["csv", "parquet", "dataset"])
def test_faults_are_reported_before_anything_starts(cli: Cli, kind: str) -> None:
    (cli.directory / "bad").write_text("{}")
    done = cli.run("infer", "batch", "--config", str(cli.config(input={"glob": "bad", "format": kind})))
    assert done.code == 2 and "bad" in done.err, done
    assert not (cli.directory / "out").exists()
