"""`s3://` where files are named, as a user has it: the command line, an emulator, nothing in between."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance_cli import Cli, until
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
