"""`[cloud]` in configuration files: what is wrong with it is told where it stands, all at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from located import places
from rollout.config.cloud import CloudSection
from rollout.config.load import load_settings
from rollout.config.settings import CoordinatorSettings, WorkerSettings
from rollout.model.errors import ConfigError
from rollout.workloads.train.config import TrainConfig


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> CloudSection:
    path = tmp_path / "coordinator.toml"
    path.write_text(text)
    return load_settings(CoordinatorSettings, path, environ=environ or {}).cloud


def faults(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text, environ)
    lines = error.value.message.splitlines()
    return [line.strip().removeprefix(f"{tmp_path}/") for line in (lines[1:] if len(lines) > 1 else lines)]


AWS = '[cloud]\nprovider = "aws"\nregion = "us-west-2"\n'
GCP = '[cloud]\nprovider = "gcp"\nproject = "my-gcp-project"\n'

EXAMPLE = (
    AWS
    + """
[cloud.aws.s3]
bucket = "my-rollout-bucket"
prefix = "runs"
multipart_chunk_bytes = 16777216
[cloud.aws.sqs]
queue_url = "https://sqs.us-west-2.amazonaws.com/123456789012/rollout"
visibility_timeout_secs = 300
[cloud.aws.secrets]
allowlist = ["rollout/hf-token"]
"""
)


def test_both_forms_are_the_same(tmp_path: Path) -> None:
    long, short = read(tmp_path, EXAMPLE), read(tmp_path, EXAMPLE.replace("cloud.aws.", "cloud."))
    assert long == short
    assert (long.place, long.queue_backend, long.lease_s) == ("s3://my-rollout-bucket/runs/", "sqs", 300.0)


def test_gcp(tmp_path: Path) -> None:
    text = (
        GCP + '[cloud.gcp.gcs]\nbucket = "b.example.com"\n[cloud.gcp.pubsub]\ntopic = "work"\nsubscription = "subs"\n'
    )
    cloud = read(tmp_path, text)
    assert (cloud.place, cloud.intake, cloud.lease_s) == ("gs://b.example.com/", "subs", 30.0)


def test_all_faults_at_once_where_they_were_written(tmp_path: Path) -> None:
    text = """[cloud]
provider = "aws"
regio = "x"
bucket = "b"
[cloud.aws.s3]
buket = "my-b"
bucket = "My_B"
multipart_chunk_bytes = 5
[cloud.gcs]
bucket = "good-name"
[cloud.secrets]
allowlist = ["a*b", 3]
"""
    assert [place for fault in faults(tmp_path, text) for place in places(fault)] == [
        "coordinator.toml:3: cloud.regio",
        "coordinator.toml:4: cloud.bucket",
        "coordinator.toml:6: cloud.aws.s3.buket",
        'coordinator.toml:7: cloud.aws.s3.bucket: "My_B"',
        "coordinator.toml:8: cloud.aws.s3.multipart_chunk_bytes",
        "coordinator.toml:9: cloud.gcs",
        "coordinator.toml:12: cloud.secrets.allowlist.0",
        "coordinator.toml:12: cloud.secrets.allowlist.1",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[cloud]\nprovider = "azure"\n', '2: cloud.provider: write "aws" or "gcp", not "azure"'),
        ('[cloud]\nprovider = "AWS"\n', "did you mean"),
        ("[cloud]\nprovider = 3\n", 'write "aws" or "gcp", not 3'),
        ('[cloud.s3]\nbucket = "good-name"\n', 'provider is missing: add provider = "aws"'),
        (AWS + '[cloud.gcp.gcs]\nbucket = "good-name"\n', '4: cloud.gcp.gcs: is of provider = "gcp", but provider = "aws"'),
        (AWS + 'project = "my-project"\n', 'cloud.project: project is of provider = "gcp"'),
        (AWS + '[cloud.s3]\nbucket="abc"\n[cloud.aws.s3]\nbucket="abc"\n', "cloud.aws.s3: [cloud.s3] and"),
        (AWS + 's3 = "b"\n', "cloud.s3: must be a table"),
        (AWS + 'aws = "b"\n', "cloud.aws: must be a table, such as [cloud.aws.s3]"),
        (AWS + '[cloud.s3]\nbucket = ""\n', "cloud.s3.bucket: is empty"),
        (AWS + '[cloud.s3]\nprefix = "p"\n', "cloud.s3.bucket: is missing, and there is a prefix"),
        (AWS + '[cloud.s3]\nbucket = "s3://b-b/p"\n', 'is a URL: write bucket = "b-b" and prefix = "p"'),
        (AWS + '[cloud.s3]\nbucket = "192.168.0.1"\n', "IP address"),
        (AWS + '[cloud.s3]\nbucket = "b--x-s3"\n', "directory bucket"),
        (AWS + '[cloud.s3]\nbucket = "abc"\nprefix = "/runs"\n', "cloud.s3.prefix: begins with a slash"),
        (AWS + '[cloud.s3]\nbucket = "abc"\nprefix = "a//b"\n', "cloud.s3.prefix: has an empty part"),
        (GCP + '[cloud.gcs]\nbucket = "google-things"\n', "are Google's own"),
        (GCP + '[cloud.gcs]\nresumable_chunk_bytes = 5242881\n', "must be a multiple of 256 KiB"),
        (GCP + '[cloud.pubsub]\nsubscription = "projects/p/topics/t"\n', "projects/PROJECT/subscriptions/NAME"),
        ('[cloud]\nprovider = "gcp"\nproject = "My Project"\n', "no id of a project"),
        ('[cloud]\nprovider = "aws"\nregion = "us-west-2a"\n', 'availability zone: the region is "us-west-2"'),
        ('[cloud]\nprovider = "aws"\nregion = "oregon"\n', '"oregon" is no region'),
        (
            AWS + '[cloud.sqs]\nqueue_url = "https://sqs.us-east-1.amazonaws.com/123456789012/q"\n',
            'cloud.sqs.queue_url: is in region "us-east-1", but region = "us-west-2"',
        ),
        (AWS + '[cloud.sqs]\nqueue_url = "https://sqs.us-west-2.amazonaws.com/q"\n', "twelve digits"),
        ('[objects]\nbackend = "s3"\n', '2: objects.backend: is "s3": add [cloud] with provider = "aws"'),
        (AWS + '[objects]\nbackend = "s3"\n', "cloud.s3.bucket: is missing, and objects.backend"),
    ],
)  # fmt: skip
def test_a_fault_is_told_at_its_place(tmp_path: Path, text: str, told: str) -> None:
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    assert told in found[0]


def test_a_compatible_store_has_laxer_rules(tmp_path: Path) -> None:
    text = '[cloud]\nprovider = "aws"\nregion = "auto"\n[cloud.s3]\nbucket = "Old_Name"\nendpoint_url = "http://h:9"\n'
    assert read(tmp_path, text).bucket == "Old_Name"


@pytest.mark.parametrize("name", ["ROLLOUT_CLOUD__S3__BUCKET", "ROLLOUT_CLOUD__AWS__S3__BUCKET"])
def test_the_environment_holds_over_both_forms(tmp_path: Path, name: str) -> None:
    for text in (EXAMPLE, EXAMPLE.replace("cloud.aws.", "cloud.")):
        cloud = read(tmp_path, text, {name: "another"})
        assert (cloud.bucket, cloud.prefix) == ("another", "runs/")
        assert faults(tmp_path, text, {name: "No"})[0].startswith(name)


def test_nobody_pays_for_a_section_that_is_not_there() -> None:
    code = (
        "import rollout.cli.__main__; from rollout.config import cloud, settings; settings.WorkerSettings();"
        "import sys; print(cloud.CloudSection.__pydantic_complete__, 'aiobotocore' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_worker_reads_it_too(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(EXAMPLE)
    assert load_settings(WorkerSettings, path, environ={}).cloud.secrets.allowlist == ["rollout/hf-token"]


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_the_examples_of_the_docs_can_be_read(provider: str) -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / f"sft-tiny-{provider}.toml"
    cloud = load_settings(TrainConfig, path, environ={}).cloud
    assert (cloud.provider, cloud.bucket, cloud.prefix) == (provider, "rollout-snapshots-prod", "sft-tiny/")
