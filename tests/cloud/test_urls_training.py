"""Models and datasets by URL: what a directory in a bucket is to a run is what the same directory on disk is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from acceptance_cli import Cli
from moto_locked import AwsEmulator
from rollout_worker.backends.tiny import make_tiny
from test_urls import cli  # noqa: F401 - a fixture

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]


def put_tree(aws: AwsEmulator, bucket: str, directory: Path, prefix: str) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(directory).as_posix()}"
            aws.s3.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())


def test_a_model_in_a_bucket_writes_what_it_writes_from_disk(
    cli: Cli,  # noqa: F811
    aws: AwsEmulator,
) -> None:
    bucket = aws.bucket()
    make_tiny(cli.directory / "tiny")
    put_tree(aws, bucket, cli.directory / "tiny", "models/tiny")
    cli.rows(3)
    for uri, out in ((f"s3://{bucket}/models/tiny", "from-bucket"), ("tiny", "from-disk")):
        cli.config(
            model={"uri": uri}, sampling={"temperature": 0.0, "max_tokens": 4}, output={"dir": out},
            backend={"kind": "transformers", "device": "cpu"},
        )  # fmt: skip
        done = cli.run("infer", "batch", "--config", "batch.toml", timeout=200)
        assert done.code == 0, done
    a, b = cli.completions("from-bucket"), cli.completions("from-disk")
    assert [one["completion"] for one in a] == [one["completion"] for one in b]
    assert a[0]["model_content_id"] == b[0]["model_content_id"] and a[0]["model_uri"] == f"s3://{bucket}/models/tiny"


def test_training_reads_and_writes_buckets(
    cli: Cli,  # noqa: F811
    aws: AwsEmulator,
) -> None:
    bucket = aws.bucket()
    make_tiny(cli.directory / "tiny")
    put_tree(aws, bucket, cli.directory / "tiny", "tiny")
    for name, numbers in (("train-0", range(8)), ("train-1", range(8, 16)), ("held", range(90, 94))):
        lines = [json.dumps({"prompt": f"{n} and {n} is", "completion": f" {2 * n}"}) for n in numbers]
        aws.s3.put_object(Bucket=bucket, Key=f"data/{name}.jsonl", Body="\n".join(lines).encode() + b"\n")
    (cli.directory / "train.toml").write_text(f"""
[algorithm]
kind = "sft"
[algorithm.sft]
base_model.uri = "s3://{bucket}/tiny"
dataset.path = "s3://{bucket}/data/train-*.jsonl"
eval_dataset.path = "s3://{bucket}/data/held.jsonl"
minibatch_size = 4
optimizer = {{ lr = 1e-3 }}
budget.max_steps = 4
device = "cpu"
[snapshots]
every_steps = 2
[output]
dir = "s3://{bucket}/trained"
model = true
""")
    planned = cli.run("plan", "train.toml", timeout=200)
    assert planned.code == 0 and f"reads s3://{bucket}/data/train-0.jsonl" in planned.out, planned
    done = cli.run("train", "sft", "--config", "train.toml", timeout=250)
    assert done.code == 0, done
    keys = aws.keys(bucket, "trained/")
    assert {"trained/run-id", "trained/metrics.jsonl", "trained/summary.json", "trained/model/config.json"} <= set(keys)
    assert not [key for key in keys if key.rpartition("/")[2].startswith(".")]
    assert len(aws.body(bucket, "trained/metrics.jsonl").splitlines()) == 4
    again = cli.run("train", "sft", "--config", "train.toml", timeout=200)
    assert again.code == 0 and "is complete already" in again.out
