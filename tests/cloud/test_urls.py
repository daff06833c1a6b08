"""`s3://` where files are named, as a user has it: the command line, an emulator, nothing in between."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance_cli import Cli, until
from gcs_emulator import Gcs
from moto_locked import REGION, AwsEmulator


@pytest.fixture
def cli(tmp_path: Path, aws: AwsEmulator) -> Iterator[Cli]:
    """Without a [cloud] section: by the environment alone."""
    homes = {f"XDG_{kind}_HOME": str(tmp_path / f".{kind.lower()}") for kind in ("STATE", "CONFIG", "CACHE")}
    found = Cli(
        tmp_path,
        homes
        | {
            "AWS_ENDPOINT_URL": aws.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": REGION,
        },
    )
    yield found
    for process in found.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    until(lambda: not found.left_behind(), "every process to end")


def rows(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"prompt": f"row {n}"}).encode() + b"\n" for n in range(first, first + count))


def completions(aws: AwsEmulator, bucket: str, prefix: str = "out/") -> list[str]:
    return [json.loads(line)["prompt"] for line in aws.body(bucket, f"{prefix}completions.jsonl").splitlines()]


def staging(cli: Cli) -> Path:
    return next((cli.directory / ".state" / "rollout" / "outputs").glob("*/*"))


def test_a_batch_from_a_bucket_into_a_bucket(cli: Cli, aws: AwsEmulator) -> None:
    bucket = aws.bucket()
    aws.s3.put_object(Bucket=bucket, Key="rows/a.jsonl", Body=rows(0, 20))
    aws.s3.put_object(Bucket=bucket, Key="rows/b.jsonl.gz", Body=gzip.compress(rows(20, 10)))
    (cli.directory / "in.jsonl").write_bytes(rows(30, 5))
    cli.config(input={"glob": [f"s3://{bucket}/rows/*.jsonl*", "in.jsonl"]}, output={"dir": f"s3://{bucket}/out"})
    done = cli.run("infer", "batch", "--config", "batch.toml", "--json")
    assert done.code == 0, done
    assert done.event("summary")["files"]["completions.jsonl"] == f"s3://{bucket}/out/completions.jsonl"
    assert completions(aws, bucket) == [f"row {n}" for n in range(35)]
    assert aws.keys(bucket, "out/") == [
        f"out/{name}" for name in ("completions.jsonl", "errors.jsonl", "run-id", "summary.json")
    ]
    again = cli.run("infer", "batch", "--config", "batch.toml")
    assert again.code == 0
    assert f"is complete already: 35 completions, 0 failed, in s3://{bucket}/out/" in again.out


def batch(cli: Cli, aws: AwsEmulator, count: int = 20, **sections: dict[str, object]) -> str:
    """A bucket with rows, and a configuration that reads them and writes beside them."""
    bucket = aws.bucket()
    aws.s3.put_object(Bucket=bucket, Key="rows/a.jsonl", Body=rows(0, count))
    cli.config(
        **{"input": {"glob": f"s3://{bucket}/rows/*.jsonl"}, "output": {"dir": f"s3://{bucket}/out"}, **sections}
    )
    return bucket


@pytest.mark.slow
def test_everything_wrong_is_told_at_once_before_anything_starts(cli: Cli, aws: AwsEmulator) -> None:
    bucket = aws.bucket()
    aws.s3.put_object(Bucket=bucket, Key="rows/first.jsonl", Body=b"{}\n")
    cli.config(
        input={"glob": [f"s3://{bucket}/rows/frist.jsonl", "s3://no-such-bucket/x.jsonl", f"s3://{bucket}/none/*"]},
        output={"dir": f"s3://{bucket}/out"},
    )
    for command in (["plan", "batch.toml"], ["infer", "batch", "--config", "batch.toml"]):
        done = cli.run(*command)
        assert done.code == 2
        assert f" s3://{bucket}/rows/first.jsonl?" in done.err
        assert "no-such-bucket" in done.err and f"'s3://{bucket}/none/*'" in done.err
    assert aws.keys(bucket) == ["rows/first.jsonl"]
    cli.config(input={"glob": f"s3://{bucket}/rows/*"}, output={"dir": "s3://no-such-bucket/out"})
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 2 and "no-such-bucket" in done.err


@pytest.mark.slow
def test_a_plan_lists_what_is_read_and_written(cli: Cli, aws: AwsEmulator) -> None:
    bucket = batch(cli, aws)
    done = cli.run("plan", "batch.toml")
    assert done.code == 0
    assert f"reads s3://{bucket}/rows/a.jsonl" in done.out
    assert f"to s3://{bucket}/out" in done.out and str(cli.directory / ".state") in done.out
    assert aws.keys(bucket) == ["rows/a.jsonl"]
    aws.s3.put_object(Bucket=bucket, Key="out/errors.jsonl", Body=b"somebody's")
    refused = cli.run("plan", "batch.toml")
    assert refused.code == 2 and f"batch.toml:8: output.dir: s3://{bucket}/out/errors.jsonl " in refused.err


@pytest.mark.slow
def test_a_killed_batch_goes_on_and_ends_in_the_bucket(cli: Cli, aws: AwsEmulator) -> None:
    bucket = batch(cli, aws, 300, backend={"kind": "mock", "delay_ms": 30, "concurrency": 4})
    process = cli.start("infer", "batch", "--config", "batch.toml")
    until(lambda: any((cli.directory / ".state").glob("rollout/outputs/*/out/completions.jsonl")), "the staging")
    cli.wait_for_rows(20, process, str(staging(cli)))
    process.kill()
    process.communicate()
    assert "out/run-id" in aws.keys(bucket, "out/")
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 0, done
    assert completions(aws, bucket) == [f"row {n}" for n in range(300)]
    assert "out/.rollout-lock" not in aws.keys(bucket, "out/")
    shown = cli.run("run", "list", "--dir", f"s3://{bucket}/out")
    assert shown.code == 0 and "completed" in shown.out
    refused = cli.run("run", "results", "@last", "--output", f"s3://{bucket}/again")
    assert refused.code == 2 and "this command writes to a directory" in refused.err


@pytest.mark.slow
def test_an_interrupted_batch_says_what_is_where(cli: Cli, aws: AwsEmulator) -> None:
    bucket = batch(cli, aws, 300, backend={"kind": "mock", "delay_ms": 50, "concurrency": 2})
    process = cli.start("infer", "batch", "--config", "batch.toml")
    until(lambda: any((cli.directory / ".state").glob("rollout/outputs/*/out/completions.jsonl")), "the staging")
    cli.wait_for_rows(5, process, str(staging(cli)))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"of 300 rows are in {staging(cli)}; nothing is lost" in out
    assert f"0 of 300 rows are in s3://{bucket}/out/" in out
    assert aws.keys(bucket, "out/") == ["out/run-id"]


@pytest.mark.slow
def test_a_deleted_run_id_and_a_strange_object_are_refused(cli: Cli, aws: AwsEmulator) -> None:
    bucket = batch(cli, aws)
    assert cli.run("infer", "batch", "--config", "batch.toml").code == 0
    aws.s3.delete_object(Bucket=bucket, Key="out/run-id")
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 2 and f"s3://{bucket}/out/run-id was deleted" in done.err and str(staging(cli)) in done.err
    run_id = (staging(cli) / "run-id").read_text().strip()
    assert cli.run("infer", "batch", "--config", "batch.toml", "--resume", run_id).code == 0
    aws.s3.put_object(Bucket=bucket, Key="out/errors.jsonl", Body=b"somebody's")
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 2 and f"batch.toml:8: output.dir: s3://{bucket}/out/errors.jsonl " in done.err
    aws.s3.delete_object(Bucket=bucket, Key="out/errors.jsonl")
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 0 and "out/errors.jsonl was deleted" in done.out
    assert aws.body(bucket, "out/errors.jsonl") == b""


@pytest.mark.slow
def test_a_batch_from_gs_into_gs(cli: Cli, gcs: Gcs) -> None:
    cli.env["STORAGE_EMULATOR_HOST"] = gcs.endpoint
    place = f"gs://{gcs.bucket}"
    gcs.put("rows/a.jsonl", rows(0, 20))
    cli.config(input={"glob": f"{place}/rows/*.jsonl"}, output={"dir": f"{place}/out"})
    done = cli.run("infer", "batch", "--config", "batch.toml")
    assert done.code == 0, done
    names = ["completions.jsonl", "errors.jsonl", "run-id", "summary.json"]
    assert gcs.names() == [*(f"out/{name}" for name in names), "rows/a.jsonl"]
    assert gcs.content("out/completions.jsonl").count(b"\n") == 20
    again = cli.run("infer", "batch", "--config", "batch.toml")
    assert again.code == 0 and f"20 completions, 0 failed, in {place}/out/" in again.out


@pytest.mark.slow
def test_map_from_a_bucket_into_a_bucket(cli: Cli, aws: AwsEmulator) -> None:
    bucket = aws.bucket()
    aws.s3.put_object(Bucket=bucket, Key="in/numbers.jsonl", Body=b"1\n2\n3\n")
    (cli.directory / "mine.py").write_text("def double(row):\n    return 2 * row\n")
    done = cli.run("map", "mine:double", "--input", f"s3://{bucket}/in/*", "--output", f"s3://{bucket}/in")
    assert done.code == 0, done
    results = [json.loads(line)["result"] for line in aws.body(bucket, "in/results.jsonl").splitlines()]
    assert results == [2, 4, 6]
    again = cli.run("map", "mine:double", "--input", f"s3://{bucket}/in/*", "--output", f"s3://{bucket}/in")
    assert again.code == 0 and "left out what a run writes" in again.out  # into the directory of its input


@pytest.mark.slow
def test_failed_and_new_rows_are_merged_in_the_bucket(cli: Cli, aws: AwsEmulator) -> None:
    """Killed while they run: until the merged files are whole, those of the run before are there."""
    once: dict[str, object] = {"max_attempts": 1}
    slow: dict[str, object] = {"kind": "mock", "fail_match": "row 7", "delay_ms": 400, "concurrency": 2}
    bucket = batch(cli, aws, backend=slow, run=once)
    assert cli.run("infer", "batch", "--config", "batch.toml").code == 0
    before = {name: aws.body(bucket, f"out/{name}") for name in ("completions.jsonl", "errors.jsonl", "summary.json")}
    aws.s3.put_object(Bucket=bucket, Key="rows/b.jsonl", Body=rows(20, 20))
    extend = ("infer", "batch", "--config", "batch.toml", "--extend")
    process = cli.start(*extend)
    cli.wait_for_rows(23, process, str(staging(cli)))
    process.kill()
    process.wait()
    assert {name: aws.body(bucket, f"out/{name}") for name in before} == before
    done = cli.run(*extend, "--json")
    assert done.code == 0 and done.event("run_opened")["rows"] == 20, done
    assert completions(aws, bucket) == [f"row {n}" for n in range(40) if n != 7]
    assert cli.run("infer", "retry", f"s3://{bucket}/out", "--code", "no_such").code == 2
    cli.config(input={"glob": f"s3://{bucket}/rows/*.jsonl"}, output={"dir": f"s3://{bucket}/out"}, run=once)
    done = cli.run("infer", "retry", "--config", "batch.toml", "--json")
    assert done.code == 0 and done.event("run_opened")["rows"] == 1, done
    assert completions(aws, bucket) == [f"row {n}" for n in range(40)]
    assert aws.body(bucket, "out/errors.jsonl") == b""
    assert json.loads(aws.body(bucket, "out/summary.json"))["rows"]["completed"] == 40
