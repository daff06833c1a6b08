"""Emulators of the providers, for the conftest of each directory that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gcs_emulator import Gcs, gcs_emulator
from moto_locked import AwsEmulator, aws_emulator


@pytest.fixture(scope="session")
def aws_server() -> Iterator[AwsEmulator]:
    with aws_emulator() as emulator:
        yield emulator


@pytest.fixture
def aws(aws_server: AwsEmulator) -> AwsEmulator:
    """Names of `bucket()` and `queue()` are fresh: what other tests left there is not in the way."""
    return aws_server


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[Gcs]:
    with gcs_emulator() as emulator:
        yield emulator


@pytest.fixture
def gcs(gcs_server: Gcs) -> Gcs:
    """With an empty bucket."""
    gcs_server.renew()
    return gcs_server
