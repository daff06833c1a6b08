"""`rollout cloud`: checks the account that `[cloud]` names."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rollout.cli.boundary import FAILED, OK
from rollout.cli.program import new_app
from rollout.cloud.installed import check_installed
from rollout.config.load import load_settings, located, read_values
from rollout.config.settings import CloudFile
from rollout.model.errors import ConfigError

app = new_app(help="Check the account of a cloud provider.")


class Provider(StrEnum):
    aws = "aws"
    gcp = "gcp"


class Format(StrEnum):
    human = "human"
    json = "json"


class Part(StrEnum):
    """Names of the checks, as in `cloud_doctor.check.NAMES`, which help does not import."""

    reachability = "reachability"
    auth = "auth"
    object_store = "object_store"
    queue = "queue"
    secret_store = "secret_store"
    compute_hint = "compute_hint"
    content_id_roundtrip = "content_id_roundtrip"


@app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]
    """Check the account of a cloud provider."""


@app.command("doctor")
def doctor(
    provider: Annotated[Provider, typer.Option("--provider", help="Provider in the file.")],
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="File with [cloud].")],
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.human,
    without: Annotated[
        list[Part] | None,
        typer.Option("--without", metavar="CHECK", help="Check to omit; repeatable."),
    ] = None,
) -> None:
    """Test what a run needs of the account: network, credentials, bucket, queue, secrets, machine.

    The checks, with remedies: reachability, auth, object_store, queue, secret_store, compute_hint, content_id_roundtrip
    (64 MiB). Written data is deleted, except old versions in a bucket with versioning. Exit codes: 0 all pass; 1 one
    fails; 2 file or options are wrong.

    --format json: `{"checks": [{"name", "status", "latency_ms", "error"}], "summary": {...}}`; a passed check has no
    `error`.
    """
    file = cloud_file(config, provider.value)
    from rollout.cli.cloud_doctor.doctor import examine  # commands start faster without
    from rollout.cli.cloud_doctor.report import as_json, show, show_summary

    began = time.perf_counter()
    for_people = format is Format.human
    left_out = [one.value for one in without or ()]
    found = asyncio.run(examine(file.cloud, left_out, show if for_people else lambda _: None, file.secrets))
    total_ms = round((time.perf_counter() - began) * 1000)
    if for_people:
        show_summary(found, total_ms)
    else:
        from rollout.cli.show import print_json

        print_json(as_json(found, total_ms))
    raise typer.Exit(OK if all(one.ok for one in found) else FAILED)


def cloud_file(path: Path, provider: str) -> CloudFile:
    """Read the file. Raises ConfigError if it lacks [cloud], names another provider, or packages are missing."""
    file = load_settings(CloudFile, path)
    cloud = file.cloud
    if not cloud.provider:
        read_values(path)
        raise ConfigError(f'{path}: there is no [cloud] section: add one with provider = "{provider}"')
    with located(path):
        if cloud.provider != provider:
            raise ConfigError(
                f'cloud.provider: is "{cloud.provider}", and --provider is {provider}: give --provider {cloud.provider}'
            )
        check_installed(cloud)
    return file
